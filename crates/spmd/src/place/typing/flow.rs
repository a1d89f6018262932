//! The flow of types through a graph.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp_kernels::{FusedOperation, PointwiseProgram};
use burn_fsdp_mesh::{Placement, ReduceOp};
use burn_ir::{BaseOperationIr, CustomOpIr, OperationIr, TensorId};

use super::SpmdType;
use super::program::of_program;
use crate::graph::{Collective, Graph, Node, Parameter, Phase, Role, Stage, Trait, Value, is};
use crate::kernels::plain_node;
use crate::norm::LOCAL_NORM;
use crate::place::rules;
use crate::place::signature::{Operand, Signature};

/// The node at which types do not fit, and why.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IllTyped {
    /// Index of the node; the number of nodes for what is wrong after the last.
    pub(crate) node: usize,
    pub(crate) reason: String,
}

/// The types of a value, one for each axis of the mesh.
type Types = Vec<SpmdType>;

/// Finds the first node of a graph of several ranks whose operands have types that it cannot take, or a result that lies
/// otherwise than it is said to. A graph of one rank alone has no types.
pub(crate) fn check(graph: &Graph) -> Result<(), IllTyped> {
    let Some((flow, ill)) = flow_of(graph) else {
        return Ok(());
    };
    if let Some(ill) = ill {
        return Err(ill);
    }
    flow.end().map_err(|reason| IllTyped {
        node: graph.nodes().len(),
        reason,
    })
}

/// Follows the types through a graph of several ranks, up to the first node that takes none.
pub(super) fn flow_of(graph: &Graph) -> Option<(Flow<'_>, Option<IllTyped>)> {
    let mesh = graph.mesh()?;
    let mut flow = Flow {
        graph,
        axes: mesh
            .axes()
            .iter()
            .map(|axis| (axis.name.as_str(), axis.size))
            .collect(),
        types: BTreeMap::new(),
    };
    for value in graph.values().filter(|value| value.role.is_given()) {
        flow.types.insert(value.id, flow.given(value));
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        if !node.is_drop()
            && let Err(reason) = flow.run(node)
        {
            let node = index;
            return Some((flow, Some(IllTyped { node, reason })));
        }
    }
    Some((flow, None))
}

pub(super) struct Flow<'a> {
    graph: &'a Graph,
    /// Name and size of each axis.
    axes: Vec<(&'a str, usize)>,
    pub(super) types: BTreeMap<TensorId, Types>,
}

impl Flow<'_> {
    fn all(&self, of: SpmdType) -> Types {
        vec![of; self.axes.len()]
    }

    /// Returns the types with which a value was placed.
    fn placed(&self, id: TensorId) -> Option<Types> {
        let placements = self.graph.placements(id)?;
        Some(placements.iter().map(|on| SpmdType::from(*on)).collect())
    }

    /// Returns the types of a given value.
    fn given(&self, value: &Value) -> Types {
        if let Some(carried) = self.graph.carried(value.id) {
            let types = carried.iter();
            return types
                .map(|on| on.map_or(SpmdType::Varying, SpmdType::from))
                .collect();
        }
        if let Some(placed) = self.placed(value.id) {
            return placed;
        }
        match &value.role {
            Role::Parameter(path) | Role::Pending(path) | Role::State { path, .. } => {
                self.of_parameter(path, value.id)
            }
            Role::Input(_) | Role::Buffer(_) if !self.graph.is_placed() => {
                self.all(SpmdType::Varying)
            }
            _ => self.all(SpmdType::Replicate),
        }
    }

    /// Returns the types of a parameter, of its gradient, or of one of its states.
    fn of_parameter(&self, path: &str, id: TensorId) -> Types {
        let parameter = self.graph.parameter(path);
        let is_cut =
            |of: &&Parameter| !(of.layout.placements.is_empty() || of.whole_states.contains(&id));
        match parameter.filter(is_cut) {
            None => self.all(SpmdType::Replicate),
            Some(parameter) => {
                let placements = parameter.layout.placements.iter();
                placements.map(|on| SpmdType::from(*on)).collect()
            }
        }
    }

    fn run(&mut self, node: &Node) -> Result<(), String> {
        if let Some(collective) = &node.collective {
            return self.exchange(node, collective);
        }
        let mut results: BTreeMap<TensorId, Types> = BTreeMap::new();
        for axis in 0..self.axes.len() {
            let types = match self.axes[axis].1 {
                1 => node.outputs().map(|_| SpmdType::Replicate).collect(),
                _ => self.on_axis(node, axis)?,
            };
            for (output, of) in node.outputs().zip(types) {
                results.entry(output).or_default().push(of);
            }
        }
        self.types.extend(results);
        Ok(())
    }

    /// Returns the types of the results on one axis.
    fn on_axis(&self, node: &Node, axis: usize) -> Result<Types, String> {
        let name = self.axes[axis].0;
        let inputs: Vec<(TensorId, SpmdType)> = node
            .inputs()
            .map(|id| Ok((id, self.of(id, axis)?)))
            .collect::<Result<_, String>>()?;
        let placed = |id| self.placed(id).map(|types| types[axis]);
        if node
            .shift
            .as_ref()
            .is_some_and(|shift| &*shift.axis == name)
        {
            return match inputs.as_slice() {
                [(_, SpmdType::Replicate)] => Ok(vec![SpmdType::Shard]),
                _ => Err(format!(
                    "it takes a rank's part along {name} of what is no whole"
                )),
            };
        }
        if let Some(draw) = node.draw.as_ref().filter(|draw| !draw.is_own) {
            let is_cut = draw.shifts.iter().any(|shift| &*shift.axis == name);
            let of = if is_cut {
                SpmdType::Shard
            } else {
                SpmdType::Replicate
            };
            let mut said = node.outputs().filter_map(placed);
            return match said.find(|said| *said != of) {
                None => Ok(node.outputs().map(|_| of).collect()),
                Some(said) => Err(format!(
                    "it draws what is {of} along {name}, and is said to be {said}"
                )),
            };
        }
        let way = self.way(node, &inputs, axis).map_err(|reason| {
            let inputs = inputs
                .iter()
                .map(|(id, of)| format!("%{} {of}", id.value()));
            let inputs: Vec<String> = inputs.collect();
            format!("{reason} along {name}: it reads {}", inputs.join(", "))
        })?;
        let types = node.outputs().map(|output| {
            let said = placed(output).or_else(|| self.stepped(node, output, axis));
            match way.result(said) {
                Some(of) => Ok(of),
                None => Err(format!(
                    "%{} is {way} along {name}, and is said to be {}",
                    output.value(),
                    said.map_or_else(|| "no part".to_owned(), |said| said.to_string())
                )),
            }
        });
        types.collect()
    }

    /// Returns the type of what the optimizer makes of nothing for a parameter, such as the zeros that a state begins with:
    /// it is that of the parameter's elements.
    fn stepped(&self, node: &Node, output: TensorId, axis: usize) -> Option<SpmdType> {
        if node.phase != Phase::Optimizer || node.inputs().next().is_some() {
            return None;
        }
        let parameter = self.graph.parameter(node.path.as_deref()?)?;
        let shape = |id| self.graph.value(id).map(|value| &value.shape);
        let is_like = shape(output) == shape(parameter.value);
        is_like
            .then(|| self.of(parameter.value, axis).ok())
            .flatten()
    }

    fn of(&self, id: TensorId, axis: usize) -> Result<SpmdType, String> {
        let types = self.types.get(&id);
        let of = types.and_then(|types| types.get(axis)).copied();
        of.ok_or_else(|| format!("nothing is known of %{}", id.value()))
    }

    /// Returns the way in which a node runs on operands of these types.
    fn way(
        &self,
        node: &Node,
        inputs: &[(TensorId, SpmdType)],
        axis: usize,
    ) -> Result<Way, &'static str> {
        let plain = plain_node(node);
        let node = plain.as_ref().unwrap_or(node);
        let has = |of: fn(&SpmdType) -> bool| inputs.iter().any(|(_, own)| of(own));
        let has_addends = has(|own| matches!(own, SpmdType::Partial(_)));
        let has_parts = has(|own| *own == SpmdType::Shard);
        let has_own = has(|own| *own == SpmdType::Varying);
        match [has_addends, has_parts, has_own] {
            [false, false, false] if is_drawn(node) => Ok(Way::Drawn),
            [false, false, false] if inputs.is_empty() => Ok(Way::Made),
            [false, false, false] if spreads(node) => Ok(Way::Spread),
            [false, false, false] => Ok(Way::Alike(SpmdType::Replicate)),
            [false, false, true] => Ok(Way::Alike(SpmdType::Varying)),
            [false, true, false] => match &node.operation {
                OperationIr::Custom(call) => self.kernel_of_parts(call, axis),
                operation => parts(operation),
            },
            [true, false, false] => addends(node, inputs).map(Way::Alike),
            [true, ..] => Err("it takes addends for values"),
            [false, true, true] => Err("it mixes parts of a whole with values of each rank's rows"),
        }
    }

    /// Returns the way of a kernel that reads parts along an axis. Where it is known along which dims they are cut, it must be
    /// able to run on such parts.
    fn kernel_of_parts(&self, call: &CustomOpIr, axis: usize) -> Result<Way, &'static str> {
        let runs = call.id == LOCAL_NORM || call.id == FusedOperation::Pointwise.name();
        let signature = match runs {
            true => Some(Signature::new()),
            false => rules::of_kernel(call),
        };
        let signature = signature.ok_or(WHOLE)?;
        let is_cut = |operand: &Operand| {
            let on = self.graph.placements(operand.id);
            match on.and_then(|on| on.get(axis)) {
                Some(Placement::Shard(dim)) => {
                    operand.letters.get(*dim).is_none_or(Option::is_none)
                }
                _ => false,
            }
        };
        match signature.inputs.iter().any(is_cut) {
            true => Err(WHOLE),
            false => Ok(Way::Parts {
                reductions: signature.contracted.into_values().collect(),
                is_local: true,
            }),
        }
    }

    /// Follows the parts of a collective.
    fn exchange(&mut self, node: &Node, collective: &Collective) -> Result<(), String> {
        let known = self
            .axes
            .iter()
            .position(|(name, _)| *name == &*collective.axis);
        let axis = known.ok_or_else(|| format!("there is no axis {}", collective.axis))?;
        let results = node.inputs().zip(node.outputs()).map(|(input, output)| {
            let types = (0..self.axes.len()).map(|other| self.of(input, other));
            let mut types = types.collect::<Result<Types, String>>()?;
            // A wait has what its start has made.
            if collective.stage == Stage::Wait {
                return Ok((output, types));
            }
            let refused = |reason: &str, along: usize| {
                let (name, of) = (self.axes[along].0, types[along]);
                format!("%{} is {of} along {name}: {reason}", input.value())
            };
            let late = (0..types.len())
                .find(|other| *other != axis && !types[*other].commutes_with(collective.reduction));
            if let Some(late) = late {
                return Err(refused("it has to be combined there first", late));
            }
            if self.axes[axis].1 > 1 {
                let after = types[axis].after(collective.kind, collective.reduction);
                types[axis] = after.map_err(|reason| refused(reason, axis))?;
            }
            Ok((output, types))
        });
        let results = results.collect::<Result<Vec<_>, String>>()?;
        self.types.extend(results);
        Ok(())
    }

    /// Checks what comes out of the graph.
    fn end(&self) -> Result<(), String> {
        for update in self.graph.updates() {
            let role = self
                .graph
                .value(update.into)
                .map(|value| value.role.to_string());
            self.expect(
                &role.unwrap_or_default(),
                (update.into, update.from),
                |into| into,
            )?;
        }
        for parameter in self.graph.parameters() {
            // A graph that is a part of a step has the gradients of that part.
            let own = parameter.gradient.filter(|id| self.types.contains_key(id));
            if let Some(gradient) = own {
                let what = format!("gradient of {}", parameter.path);
                self.expect(&what, (parameter.value, gradient), SpmdType::of_gradient)?;
            }
        }
        let whole = self
            .graph
            .outputs()
            .values()
            .filter(|_| self.graph.is_placed());
        for id in self.graph.loss().iter().chain(whole) {
            for (axis, (name, size)) in self.axes.iter().enumerate() {
                let of = self.of(*id, axis)?;
                if *size > 1 && of != SpmdType::Replicate {
                    return Err(format!(
                        "%{} comes out of the step, and is {of} along {name}",
                        id.value()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that a value has the type that another's makes of it.
    fn expect(
        &self,
        what: &str,
        (like, id): (TensorId, TensorId),
        made: impl Fn(SpmdType) -> SpmdType,
    ) -> Result<(), String> {
        for (axis, (name, size)) in self.axes.iter().enumerate() {
            let (expected, got) = (made(self.of(like, axis)?), self.of(id, axis)?);
            if *size > 1 && !expected.takes(got) {
                return Err(format!(
                    "{what} is {expected} along {name}, and %{} is {got}",
                    id.value()
                ));
            }
        }
        Ok(())
    }
}

/// The way in which a node runs on the ranks of one axis.
#[derive(Debug, Clone, PartialEq)]
enum Way {
    /// It makes what it needs of nothing.
    Made,
    /// It draws random numbers, other ones on each rank.
    Drawn,
    /// It repeats what is the same on all ranks along a dim that its operands lack, all of it or a part.
    Spread,
    /// Its results are of the type of its operands.
    Alike(SpmdType),
    /// It runs on parts: its results are parts, or addends of these reductions. Of operations on the elements at one place
    /// nobody has to say which.
    Parts {
        reductions: Vec<ReduceOp>,
        is_local: bool,
    },
}

impl Way {
    /// Returns the type of a result that is said to have a type; `None` if it cannot have it.
    fn result(&self, said: Option<SpmdType>) -> Option<SpmdType> {
        let is_partial = |of: &SpmdType| matches!(of, SpmdType::Partial(_));
        match (self, said) {
            (Self::Made | Self::Spread, said) => said
                .or(Some(SpmdType::Replicate))
                .filter(|of| !is_partial(of)),
            (Self::Drawn, None) => Some(SpmdType::Varying),
            (Self::Drawn, Some(said)) => (said == SpmdType::Shard).then_some(said),
            (Self::Alike(own), None) => Some(*own),
            (Self::Alike(own), Some(said)) => (said == *own).then_some(said),
            (Self::Parts { is_local, .. }, None) => is_local.then_some(SpmdType::Shard),
            (Self::Parts { .. }, Some(SpmdType::Shard)) => Some(SpmdType::Shard),
            (Self::Parts { reductions, .. }, Some(SpmdType::Partial(op))) => {
                reductions.contains(&op).then_some(SpmdType::Partial(op))
            }
            (Self::Parts { .. }, Some(_)) => None,
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Made => f.write_str("made of nothing"),
            Self::Drawn => f.write_str("drawn by each rank"),
            Self::Spread => f.write_str("repeated"),
            Self::Alike(of) => of.fmt(f),
            Self::Parts { .. } => f.write_str("made of parts"),
        }
    }
}

fn is_drawn(node: &Node) -> bool {
    node.is_opaque() && node.custom.is_none()
}

/// Returns true if a result has a dim that no operand has.
fn spreads(node: &Node) -> bool {
    if node.custom.is_some() || !rules::may_wait(&node.operation) {
        return false;
    }
    let signature = rules::signature(&node.operation);
    let is_given = |letter| {
        signature
            .inputs
            .iter()
            .any(|input| input.dim_of(letter).is_some())
    };
    signature
        .letters()
        .into_iter()
        .any(|letter| !is_given(letter))
}

/// Why an operation cannot run on parts.
const WHOLE: &str = "it takes parts for the whole";

/// Returns the way of an operation of Burn that reads parts.
fn parts(operation: &OperationIr) -> Result<Way, &'static str> {
    let signature = rules::signature(operation);
    let is_local = is(operation, Trait::Pointwise) || is(operation, Trait::View);
    if signature.letters().is_empty() && !is_local {
        return Err(WHOLE);
    }
    Ok(Way::Parts {
        reductions: signature.contracted.into_values().collect(),
        is_local,
    })
}

/// Returns the type of the result of a node that reads addends.
fn addends(node: &Node, inputs: &[(TensorId, SpmdType)]) -> Result<SpmdType, &'static str> {
    const NOT_LINEAR: &str = "it is not linear in the addends that it reads";
    if let OperationIr::Custom(call) = &node.operation
        && call.id == FusedOperation::Pointwise.name()
    {
        let program = PointwiseProgram::from_scalars(&call.scalars);
        let types: Vec<SpmdType> = inputs.iter().map(|(_, of)| *of).collect();
        let of = program.and_then(|program| of_program(&program, &types));
        return of.ok_or(NOT_LINEAR);
    }
    let partial = inputs.iter().filter(|(_, of)| *of != SpmdType::Replicate);
    let partial: BTreeMap<TensorId, SpmdType> = partial.copied().collect();
    let mut ops = partial.values();
    let first = *ops.next().ok_or(NOT_LINEAR)?;
    let signature = match &node.operation {
        OperationIr::Custom(call) => rules::of_kernel(call).ok_or(NOT_LINEAR)?,
        operation => rules::signature(operation),
    };
    let is_set = |set: &Vec<TensorId>| {
        set.iter().copied().collect::<BTreeSet<_>>() == partial.keys().copied().collect()
    };
    let is_linear = signature.linear.iter().any(is_set)
        || cast_or_cleared(&node.operation).is_some_and(|id| is_set(&vec![id]));
    match is_linear && ops.all(|op| *op == first) {
        true => Ok(first),
        false => Err(NOT_LINEAR),
    }
}

/// Returns the float that a node casts, or of which it sets elements to zero, as of padding: it is linear in it.
fn cast_or_cleared(operation: &OperationIr) -> Option<TensorId> {
    if let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation {
        return Some(op.input.id);
    }
    let (OperationIr::BaseFloat(BaseOperationIr::MaskFill(op))
    | OperationIr::BaseInt(BaseOperationIr::MaskFill(op))) = operation
    else {
        return None;
    };
    (op.value.elem::<f64>() == 0.0).then_some(op.tensor.id)
}
