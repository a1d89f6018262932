//! Type inference along the nodes of a graph.

use std::collections::BTreeMap;

use burn_fsdp_mesh::Placement;
use burn_ir::{CustomOpIr, OperationIr, TensorId};

use super::SpmdType;
use super::way::{WHOLE, Way, addends, is_drawn, of_owner, parts, spreads};
use crate::graph::{Collective, Graph, Node, Owner, Parameter, Phase, Role, Stage, Value};
use crate::kernels::{is_program, plain_node};
use crate::low_bit::StateOperation;
use crate::norm::LOCAL_NORM;
use crate::place::rules;
use crate::place::signature::{Operand, Signature};

/// The node with a type error, and the reason.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IllTyped {
    /// Index of the node, or the number of nodes for an error after the last one.
    pub(crate) node: usize,
    pub(crate) reason: String,
}

/// The types of a value, one for each axis of the mesh.
type Types = Vec<SpmdType>;

/// Checks the types of a graph of several ranks. The error names the first node that does not accept an operand's type,
/// or whose result differs from the declared placement; or it is about an update, gradient or result at the end. A
/// graph of a single rank has no types.
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

/// Infers the types in a graph of several ranks, up to the first node with a type error. Returns `None` for a graph of
/// a single rank.
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

    /// Returns a value's types from its declared placements, if it has any.
    fn placed(&self, id: TensorId) -> Option<Types> {
        let placements = self.graph.placements(id)?;
        Some(placements.iter().map(|on| SpmdType::from(*on)).collect())
    }

    /// Returns the types of a given value.
    fn given(&self, value: &Value) -> Types {
        if let Some(carried) = self.graph.carried(value.id) {
            let of = |on| SpmdType::of_placement(on, carried.owner);
            let types = carried.on.iter();
            return types.map(|on| on.map_or(SpmdType::Varying, of)).collect();
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
                let layout = &parameter.layout;
                let of = |on: &Placement| SpmdType::of_placement(*on, layout.owner);
                layout.placements.iter().map(of).collect()
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

    /// Returns the types of a node's results on one axis.
    fn on_axis(&self, node: &Node, axis: usize) -> Result<Types, String> {
        let name = self.axes[axis].0;
        let inputs: Vec<(TensorId, SpmdType)> = node
            .inputs()
            .map(|id| Ok((id, self.of(id, axis)?)))
            .collect::<Result<_, String>>()?;
        let placed = |id| self.placed(id).map(|types| types[axis]);
        let is_state = StateOperation::of(&node.operation).is_some();
        let mut shift = node.shift.iter().filter(|_| !is_state);
        if shift.any(|shift| &*shift.axis == name) {
            return match inputs.as_slice() {
                [(_, SpmdType::Replicate)] => Ok(vec![SpmdType::Shard]),
                _ => Err(format!(
                    "it takes a rank's part along {name} of a value that is not whole"
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
                    "it draws values that are {of} along {name}, but are declared {said}"
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
                    "%{} is {way} along {name}, but declared {}",
                    output.value(),
                    said.map_or_else(|| "not divided".to_owned(), |said| said.to_string())
                )),
            }
        });
        types.collect()
    }

    /// Returns the type of a value that the optimizer creates for a parameter without inputs, such as the initial zeros
    /// of a state: the parameter's type. `None` for other values, and for other shapes unless one rank owns the
    /// parameter.
    fn stepped(&self, node: &Node, output: TensorId, axis: usize) -> Option<SpmdType> {
        if node.phase != Phase::Optimizer || node.inputs().next().is_some() {
            return None;
        }
        let parameter = self.graph.parameter(node.path.as_deref()?)?;
        let shape = |id| self.graph.value(id).map(|value| &value.shape);
        let is_like = shape(output) == shape(parameter.value);
        let of = self.of(parameter.value, axis).ok();
        of.filter(|of| is_like || of.owner().is_some())
    }

    /// Returns the way of a node that only an owner runs: one that reads an owned value, or belongs to the optimizer of
    /// an owned parameter. Norms are an exception: they cover each rank's parts, and a rank may have none.
    fn way_of_owner(
        &self,
        node: &Node,
        inputs: &mut [(TensorId, SpmdType)],
        axis: usize,
    ) -> Result<Option<Way>, &'static str> {
        if matches!(&node.operation, OperationIr::Custom(call) if call.id == LOCAL_NORM) {
            let owned = inputs.iter_mut().filter(|(_, of)| of.owner().is_some());
            owned.for_each(|(_, of)| *of = SpmdType::Shard);
            return Ok(None);
        }
        let of_parameter = || {
            let path = node
                .path
                .as_deref()
                .filter(|_| node.phase == Phase::Optimizer)?;
            let parameter = self.graph.parameter(path)?;
            Some((parameter.value, self.of(parameter.value, axis).ok()?))
        };
        match of_parameter() {
            Some(own) if own.1.owner().is_some() => {
                let all = inputs.iter().copied().chain([own]);
                of_owner(&all.collect::<Vec<_>>())
            }
            _ => of_owner(inputs),
        }
    }

    /// Returns the owners of the values that only one rank has.
    pub(super) fn owned(self) -> BTreeMap<TensorId, Owner> {
        let axes = self.axes;
        let owned = self.types.into_iter().filter_map(|(id, types)| {
            let mut types = axes.iter().zip(types).filter(|((_, size), _)| *size > 1);
            types.find_map(|((axis, _), of)| {
                let axis = (*axis).into();
                of.owner().map(|index| (id, Owner { axis, index }))
            })
        });
        owned.collect()
    }

    fn of(&self, id: TensorId, axis: usize) -> Result<SpmdType, String> {
        let types = self.types.get(&id);
        let of = types.and_then(|types| types.get(axis)).copied();
        of.ok_or_else(|| format!("the type of %{} is unknown", id.value()))
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
        let mut inputs = inputs.to_vec();
        if let Some(way) = self.way_of_owner(node, &mut inputs, axis)? {
            return Ok(way);
        }
        let inputs = inputs.as_slice();
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
            [true, ..] => Err("it takes addends as values"),
            [false, true, true] => Err("it mixes parts of a whole with values of each rank's rows"),
        }
    }

    /// Returns the way of a kernel that reads parts along an axis. It must support parts along the sharded dims, as far
    /// as these are known.
    fn kernel_of_parts(&self, call: &CustomOpIr, axis: usize) -> Result<Way, &'static str> {
        let runs =
            call.id == LOCAL_NORM || is_program(call) || StateOperation::named(&call.id).is_some();
        let signature = if runs {
            Some(Signature::new())
        } else {
            rules::of_kernel(call)
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
        if signature.inputs.iter().any(is_cut) {
            Err(WHOLE)
        } else {
            Ok(Way::Parts {
                reductions: signature.contracted.into_values().collect(),
                is_local: true,
            })
        }
    }

    /// Infers the types of a collective's results.
    fn exchange(&mut self, node: &Node, collective: &Collective) -> Result<(), String> {
        let known = self
            .axes
            .iter()
            .position(|(name, _)| *name == &*collective.axis);
        let axis = known.ok_or_else(|| format!("there is no axis {}", collective.axis))?;
        let ends = node.inputs().zip(node.outputs());
        let results = ends.zip(&collective.parts).map(|((input, output), part)| {
            let types = (0..self.axes.len()).map(|other| self.of(input, other));
            let mut types = types.collect::<Result<Types, String>>()?;
            // A wait returns the results of its start.
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
                return Err(refused("it must be combined there first", late));
            }
            if self.axes[axis].1 > 1 {
                let (kind, reduction) = (collective.kind, collective.reduction);
                let after = types[axis].after(kind, reduction, part.partition.sole_owner());
                types[axis] = after.map_err(|reason| refused(reason, axis))?;
            }
            Ok((output, types))
        });
        let results = results.collect::<Result<Vec<_>, String>>()?;
        self.types.extend(results);
        Ok(())
    }

    /// Checks the types of updates, gradients and results at the end of the graph.
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
            // A graph of a part of a step has only the gradients of that part.
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
                        "%{} is a result of the step, but is {of} along {name}",
                        id.value()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that `id` has the type that `made` derives from the type of `like`.
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
                    "{what} is {expected} along {name}, but %{} is {got}",
                    id.value()
                ));
            }
        }
        Ok(())
    }
}
