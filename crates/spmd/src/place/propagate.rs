use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Mesh, Placement, ReduceOp};
use burn_ir::{OperationIr, TensorId};

use super::expand::Expand;
use super::layout::{AxisPlacement, local_shape};
use super::redistribute::{Reader, Redistribution, cost};
use super::rules;
use super::signature::{Letter, Signature};
use crate::Error;
use crate::graph::{Graph, Node, ParameterLayout, Payload, Phase, Role, rename};
use crate::passes::GraphTransform;
use crate::run::{element_type, gathered_type};

/// Insertion of collectives by placement: turns a graph of one rank, over the joined batch, into that
/// of each rank of a mesh. See the [module](super).
///
/// ```text
/// before                                   after (w1 cut by columns, w2 by rows, on 2 ranks)
/// %0 parameter w1 f32[4, 8]                %0 parameter w1 f32[4, 4]
/// %1 parameter w2 f32[8, 4]                %1 parameter w2 f32[4, 4]
/// %3 = Module.Linear(%2, %0)  f32[6, 8]    %3 = Module.Linear(%2, %0)  f32[6, 4]
/// %4 = Activation.Gelu(%3)    f32[6, 8]    %4 = Activation.Gelu(%3)    f32[6, 4]
/// %5 = Module.Linear(%4, %1)  f32[6, 4]    %5 = Module.Linear(%4, %1)  f32[6, 4]
/// %6 = Activation.Gelu(%5)    f32[6, 4]    %7 = all_reduce(%5)         f32[6, 4]
///                                          %6 = Activation.Gelu(%7)    f32[6, 4]
/// ```
#[derive(Debug, Clone)]
pub struct ExpandPlacements {
    /// The placements that are given.
    pub expand: Expand,
    /// The ranks.
    pub mesh: Mesh,
}

impl GraphTransform for ExpandPlacements {
    fn name(&self) -> &'static str {
        "insert collectives"
    }

    fn before(&self) -> &'static [&'static str] {
        &["liveness"]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        Ok(self.place(graph)?.0)
    }
}

impl ExpandPlacements {
    /// The graph of each rank, and the bytes that a rank receives in it.
    pub(super) fn place(&self, mut graph: Graph) -> Result<(Graph, f64), Error> {
        graph.set_num_ranks(self.mesh.size());
        let nodes = graph.take_nodes();
        let mut placer = Placer::new(self, graph)?;
        for node in nodes {
            placer.place(node)?;
        }
        placer.finish()
    }
}

/// One placement per axis.
type On = Vec<Placement>;

/// A copy of a value that lies in some way.
#[derive(Debug, Clone)]
struct Version {
    id: TensorId,
    on: On,
}

/// Where a value of the graph before is.
#[derive(Debug, Clone)]
enum Located {
    /// It lies in one or more ways.
    Placed(Vec<Version>),
    /// It is made of nothing, by this node, once somebody wants it.
    Floating(Arc<Node>),
}

/// What has to hold of a value as soon as it is there.
#[derive(Debug, Clone, Default)]
struct Destination {
    /// It is the gradient of the parameters of these indices: those that are added to each other share
    /// one.
    gradients: Vec<usize>,
    is_loss: bool,
    /// The updates that it is the source of.
    updates: Vec<usize>,
}

/// How an operation runs: how its inputs must lie, and how its outputs will.
#[derive(Debug, Clone, Default)]
struct Strategy {
    inputs: BTreeMap<TensorId, On>,
    outputs: BTreeMap<TensorId, On>,
}

/// One way to run on one axis.
#[derive(Debug, Clone)]
enum Candidate {
    Whole,
    Cut(Letter),
    /// On addends: these inputs, with their placement.
    Addends(Vec<TensorId>, Placement),
}

struct Placer {
    axes: Vec<AxisPlacement>,
    graph: Graph,
    scheduled: Vec<Node>,
    /// Shapes and types on one rank that has everything.
    whole: HashMap<TensorId, (Vec<usize>, DType)>,
    located: HashMap<TensorId, Located>,
    destinations: HashMap<TensorId, Destination>,
    parameters: Vec<On>,
    /// Gradients as the optimizer reads them.
    settled: HashMap<TensorId, Vec<Version>>,
    is_optimizing: bool,
    moved: f64,
}

impl Placer {
    fn new(pass: &ExpandPlacements, mut graph: Graph) -> Result<Self, Error> {
        let (expand, mesh) = (&pass.expand, &pass.mesh);
        let axes: Vec<_> = mesh
            .axes()
            .iter()
            .map(|axis| AxisPlacement {
                axis: axis.name.as_str().into(),
                num_ranks: axis.size,
                placement: Placement::Replicate,
            })
            .collect();
        let values = graph.values();
        let whole: HashMap<_, _> = values
            .map(|value| (value.id, (value.shape.clone(), value.dtype)))
            .collect();
        let mut given: BTreeMap<TensorId, Vec<AxisPlacement>> = BTreeMap::new();
        let mut destinations: HashMap<TensorId, Destination> = HashMap::new();
        let mut parameters = Vec::new();
        for (index, parameter) in graph.parameters_mut().iter_mut().enumerate() {
            let placements = match parameter.is_buffer {
                true => axes.clone(),
                false => expand.of_parameter(mesh, &parameter.path, &parameter.shape)?,
            };
            for id in parameter.states.iter().chain([&parameter.value]) {
                let like = whole.get(id).is_some_and(|w| w.0 == parameter.shape);
                let own = if like { &placements } else { &axes };
                given.insert(*id, own.clone());
            }
            if let Some(gradient) = parameter.gradient {
                let destination = destinations.entry(gradient).or_default();
                destination.gradients.push(index);
            }
            parameters.push(on(&placements));
            if placements
                .iter()
                .any(|p| p.placement != Placement::Replicate)
            {
                parameter.layout = ParameterLayout::Placed(placements.into());
            }
        }
        for input in graph.inputs().to_vec() {
            let Some(value) = graph.value(input) else {
                continue;
            };
            let name = match &value.role {
                Role::Input(name) => name.clone(),
                other => Arc::from(other.to_string()),
            };
            // What was traced is the joined batch.
            let shape = value.shape.clone();
            let placements = expand.of_joined_input(mesh, &name, &shape)?;
            given.insert(input, placements);
        }
        for (index, update) in graph.updates().iter().enumerate() {
            let destination = destinations.entry(update.from).or_default();
            destination.updates.push(index);
        }
        if let Some(loss) = graph.loss() {
            destinations.entry(loss).or_default().is_loss = true;
        }
        let mut located = HashMap::new();
        for (id, (shape, _)) in &whole {
            if !graph.is_given(*id) {
                continue;
            }
            let placements = given.get(id).unwrap_or(&axes);
            if let Some(value) = graph.value_mut(*id) {
                value.shape = local_shape(shape, placements);
            }
            let version = Version {
                id: *id,
                on: on(placements),
            };
            located.insert(*id, Located::Placed(vec![version]));
        }
        Ok(Self {
            axes,
            graph,
            scheduled: Vec::new(),
            whole,
            located,
            destinations,
            parameters,
            settled: HashMap::new(),
            is_optimizing: false,
            moved: 0.0,
        })
    }

    fn place(&mut self, node: Node) -> Result<(), Error> {
        if node.phase == Phase::Optimizer && !self.is_optimizing {
            self.begin_optimizer();
        }
        if self.is_made_of_nothing(&node) {
            let node = Arc::new(node);
            for output in node.outputs() {
                self.located.insert(output, Located::Floating(node.clone()));
            }
            return Ok(());
        }
        if self.sums_over_cut(&node)
            && let Some(nodes) = rules::without_bias(&mut self.graph, &node)?
        {
            for node in nodes {
                for tensor in node.operation.outputs() {
                    let known = (tensor.shape.to_vec(), tensor.dtype);
                    self.whole.insert(tensor.id, known);
                }
                self.place(node)?;
            }
            return Ok(());
        }
        if let Some(axis) = self.axes.iter().find(|axis| axis.num_ranks > 1)
            && node.is_opaque()
        {
            let shape = node
                .operation
                .outputs()
                .next()
                .map(|out| out.shape.to_vec());
            return Err(Error::RandomReplicated {
                operation: node.name(),
                shape: shape.unwrap_or_default(),
                axis: axis.axis.to_string(),
            });
        }
        let signature = rules::signature(&node.operation);
        let strategy = self.choose(&node, &signature)?;
        self.emit(&node, &signature, strategy)
    }

    /// The optimizer reads gradients where their parameters are, and given values where they are given: what
    /// forward and backward made of them belongs to those, and may run at another time.
    fn begin_optimizer(&mut self) {
        self.is_optimizing = true;
        for (id, versions) in std::mem::take(&mut self.settled) {
            self.located.insert(id, Located::Placed(versions));
        }
        for (id, located) in &mut self.located {
            if let Located::Placed(versions) = located
                && self.graph.is_given(*id)
            {
                versions.truncate(1);
            }
        }
    }

    /// Whether a node can wait until somebody wants its outputs: everything that it reads does, too.
    fn is_made_of_nothing(&self, node: &Node) -> bool {
        // One rank draws its random numbers in the order of the graph.
        if self.axes.iter().all(|axis| axis.num_ranks == 1) {
            return false;
        }
        let floats = |id| matches!(self.located.get(&id), Some(Located::Floating(_)));
        rules::may_wait(&node.operation) && node.inputs().all(floats)
    }

    /// Whether a linear layer's weight is cut along the dim that it sums over.
    fn sums_over_cut(&self, node: &Node) -> bool {
        let OperationIr::Module(burn_ir::ModuleOperationIr::Linear(op)) = &node.operation else {
            return false;
        };
        match self.located.get(&op.weight.id) {
            Some(Located::Placed(versions)) => {
                versions.len() == 1 && versions[0].on.contains(&Placement::Shard(0))
            }
            _ => false,
        }
    }

    /// The way to run that moves the fewest bytes, one axis after the other.
    fn choose(&self, node: &Node, signature: &Signature) -> Result<Strategy, Error> {
        let mut strategy = Strategy::default();
        for axis in 0..self.axes.len() {
            let mut best: Option<(f64, u8, Strategy)> = None;
            for candidate in self.candidates(signature, axis) {
                let Some(next) = self.extend(signature, &strategy, axis, &candidate) else {
                    continue;
                };
                let Some(cost) = self.cost(&next, axis) else {
                    continue;
                };
                let rank = match candidate {
                    Candidate::Whole => 1,
                    _ if self.is_given(&next, axis) => 0,
                    _ => 2,
                };
                let is_better = match &best {
                    None => true,
                    Some((least, other, _)) => (cost, rank) < (*least, *other),
                };
                if is_better {
                    best = Some((cost, rank, next));
                }
            }
            let Some((_, _, next)) = best else {
                return Err(self.refused(node, axis));
            };
            strategy = next;
        }
        Ok(strategy)
    }

    fn candidates(&self, signature: &Signature, axis: usize) -> Vec<Candidate> {
        let mut candidates = vec![Candidate::Whole];
        if self.axes[axis].num_ranks == 1 {
            return candidates;
        }
        // A dim that only the results have is nothing to divide work by.
        let is_given = |letter: &Letter| {
            let mut inputs = signature.inputs.iter();
            inputs.any(|input| input.dim_of(*letter).is_some())
        };
        let letters = signature.letters().into_iter().filter(is_given);
        candidates.extend(letters.map(Candidate::Cut));
        for set in &signature.linear {
            let first = set.first().and_then(|id| self.addend(*id, axis));
            if let Some(placement) = first
                && set.iter().all(|id| self.addend(*id, axis) == first)
            {
                candidates.push(Candidate::Addends(set.clone(), placement));
            }
        }
        candidates
    }

    /// How the ranks of an axis combine their addends of a value, if that is the only way it lies.
    fn addend(&self, id: TensorId, axis: usize) -> Option<Placement> {
        match self.located.get(&id) {
            Some(Located::Placed(versions)) if versions.len() == 1 => {
                let placement = versions[0].on[axis];
                let is_sum = matches!(
                    placement,
                    Placement::Partial(ReduceOp::Sum | ReduceOp::Mean)
                );
                is_sum.then_some(placement)
            }
            _ => None,
        }
    }

    /// The strategy with one more axis; `None` where the operation cannot run like that.
    fn extend(
        &self,
        signature: &Signature,
        strategy: &Strategy,
        axis: usize,
        candidate: &Candidate,
    ) -> Option<Strategy> {
        let num_ranks = self.axes[axis].num_ranks;
        let is_cut =
            |on: Option<&On>, dim: usize| on.is_some_and(|on| on.contains(&Placement::Shard(dim)));
        let mut next = strategy.clone();
        let mut seen: BTreeMap<TensorId, Placement> = BTreeMap::new();
        for input in &signature.inputs {
            let placement = match candidate {
                Candidate::Whole => Placement::Replicate,
                Candidate::Addends(set, placement) => match set.contains(&input.id) {
                    true => *placement,
                    false => Placement::Replicate,
                },
                Candidate::Cut(letter) => match input.dim_of(*letter) {
                    None => Placement::Replicate,
                    Some(dim) => {
                        if !input.shape[dim].is_multiple_of(num_ranks)
                            || is_cut(strategy.inputs.get(&input.id), dim)
                        {
                            return None;
                        }
                        Placement::Shard(dim)
                    }
                },
            };
            // A tensor that is read twice lies in one way.
            match seen.insert(input.id, placement) {
                Some(other) if other != placement => return None,
                Some(_) => {}
                None => next.inputs.entry(input.id).or_default().push(placement),
            }
        }
        for output in &signature.outputs {
            let placement = match candidate {
                Candidate::Whole => Placement::Replicate,
                Candidate::Addends(_, placement) => *placement,
                Candidate::Cut(letter) => match output.dim_of(*letter) {
                    Some(dim) => {
                        if !output.shape[dim].is_multiple_of(num_ranks)
                            || is_cut(strategy.outputs.get(&output.id), dim)
                        {
                            return None;
                        }
                        Placement::Shard(dim)
                    }
                    None => {
                        let op = *signature.contracted.get(letter)?;
                        // Nothing could bring addends together that are no floats, but a sum on its way to one.
                        let (_, dtype) = self.whole.get(&output.id)?;
                        if element_type(*dtype).is_none() && op != ReduceOp::Sum {
                            return None;
                        }
                        Placement::Partial(op)
                    }
                },
            };
            next.outputs.entry(output.id).or_default().push(placement);
        }
        Some(next)
    }

    /// Whether an input is cut, or an addend, on that axis as the strategy wants it.
    fn is_given(&self, strategy: &Strategy, axis: usize) -> bool {
        strategy.inputs.iter().any(|(id, on)| {
            let lies = |version: &Version| version.on[axis] == on[axis];
            match self.located.get(id) {
                Some(Located::Placed(versions)) => {
                    on[axis] != Placement::Replicate && versions.iter().any(lies)
                }
                _ => false,
            }
        })
    }

    /// Bytes that have to be moved on one axis before a node can run; `None` where they cannot be.
    fn cost(&self, strategy: &Strategy, axis: usize) -> Option<f64> {
        let mut total = 0.0;
        for (id, on) in &strategy.inputs {
            let (shape, dtype) = self.whole.get(id)?;
            let num_bytes = (shape.iter().product::<usize>() * dtype.size()) as f64;
            let Located::Placed(versions) = self.located.get(id)? else {
                continue;
            };
            let num_ranks = self.axes[axis].num_ranks;
            let ways = versions.iter().filter_map(|version| {
                let (from, to) = (version.on[axis], on[axis]);
                // Every type is gathered, floats alone are added up.
                let movable = match from {
                    Placement::Replicate => true,
                    Placement::Shard(_) => gathered_type(*dtype).is_some(),
                    Placement::Partial(_) => element_type(*dtype).is_some(),
                };
                if from != to && !movable {
                    return None;
                }
                cost(from, to, num_bytes, num_ranks)
            });
            total += ways.min_by(f64::total_cmp)?;
        }
        Some(total)
    }

    fn refused(&self, node: &Node, axis: usize) -> Error {
        let operands = node.operation.inputs().map(|input| {
            let shape = self.whole.get(&input.id).map(|whole| &whole.0);
            let on = match self.located.get(&input.id) {
                Some(Located::Placed(versions)) => versions[0].on[axis].to_string(),
                _ => "anywhere".to_owned(),
            };
            format!("{:?} {:?} {on}", input.dtype, shape.map_or(&[][..], |s| s))
        });
        Error::NoRule {
            operation: node.name(),
            axis: self.axes[axis].axis.to_string(),
            operands: operands.collect::<Vec<_>>().join(", "),
        }
    }

    /// Brings the inputs where they must lie, and appends the node.
    fn emit(
        &mut self,
        node: &Node,
        signature: &Signature,
        strategy: Strategy,
    ) -> Result<(), Error> {
        let mut ids = BTreeMap::new();
        for (id, on) in &strategy.inputs {
            ids.insert(*id, self.fetch(*id, on, &Reader::of(node))?);
        }
        for output in &signature.outputs {
            let placements = self.described(&strategy.outputs[&output.id]);
            let local = local_shape(&output.shape, &placements);
            if let Some(value) = self.graph.value_mut(output.id) {
                value.shape = local;
            }
        }
        let mut local = node.clone();
        rename(&mut local.operation, &ids);
        self.graph.sync_node(&mut local);
        rules::localize(&mut local.operation);
        self.scheduled.push(local);
        for (id, on) in strategy.outputs {
            let version = Version { id, on };
            self.located.insert(id, Located::Placed(vec![version]));
        }
        for output in node.outputs() {
            self.settle(output, &Reader::of(node))?;
        }
        Ok(())
    }

    /// A version of a value that lies in a given way.
    fn fetch(&mut self, id: TensorId, to: &On, reader: &Reader) -> Result<TensorId, Error> {
        if let Some(Located::Floating(node)) = self.located.get(&id).cloned() {
            self.make(&node, id, to, reader)?;
        }
        let undeclared = || Error::Internal(format!("value {} lies nowhere", id.value()));
        let Some(Located::Placed(versions)) = self.located.get(&id) else {
            return Err(undeclared());
        };
        if let Some(version) = versions.iter().find(|version| version.on == *to) {
            return Ok(version.id);
        }
        let distance = |version: &Version| {
            let axes = self.axes.iter().enumerate();
            let costs = axes.map(|(k, axis)| cost(version.on[k], to[k], 1.0, axis.num_ranks));
            costs.map(|cost| cost.unwrap_or(f64::INFINITY)).sum::<f64>()
        };
        let nearest = versions
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .cloned()
            .ok_or_else(undeclared)?;
        let (label, payload) = self.named(id);
        let (from, target) = (self.described(&nearest.on), self.described(to));
        let mut redistribution = Redistribution {
            graph: &mut self.graph,
            scheduled: &mut self.scheduled,
            label,
            payload,
            reader,
            moved: &mut self.moved,
        };
        let new = redistribution.run(nearest.id, &from, &target)?;
        if let Some(Located::Placed(versions)) = self.located.get_mut(&id) {
            versions.push(Version {
                id: new,
                on: to.clone(),
            });
        }
        Ok(new)
    }

    /// Makes what is made of nothing, where it is wanted.
    fn make(&mut self, node: &Node, id: TensorId, to: &On, reader: &Reader) -> Result<(), Error> {
        let signature = rules::signature(&node.operation);
        let wanted = signature.outputs.iter().find(|output| output.id == id);
        let letters = wanted.map(|output| output.letters.clone());
        let letters = letters.unwrap_or_default();
        let mut strategy = Strategy::default();
        for (axis, placement) in to.iter().enumerate() {
            let letter = match placement {
                Placement::Shard(dim) => letters.get(*dim).copied().flatten(),
                _ => None,
            };
            let cut = letter.and_then(|letter| {
                self.extend(&signature, &strategy, axis, &Candidate::Cut(letter))
            });
            let is_random = node.is_opaque() && self.axes[axis].num_ranks > 1;
            let next = match cut {
                Some(next) => Some(next),
                // Ranks draw other numbers each: they draw parts, and gather them.
                None if is_random => {
                    let letters = letters.iter().flatten();
                    let mut ways = letters.filter_map(|letter| {
                        self.extend(&signature, &strategy, axis, &Candidate::Cut(*letter))
                    });
                    let way = ways.next().ok_or_else(|| Error::RandomReplicated {
                        operation: node.name(),
                        shape: wanted.map_or_else(Vec::new, |output| output.shape.clone()),
                        axis: self.axes[axis].axis.to_string(),
                    });
                    Some(way?)
                }
                None => self.extend(&signature, &strategy, axis, &Candidate::Whole),
            };
            strategy = next.ok_or_else(|| self.refused(node, axis))?;
        }
        let node = Node {
            phase: reader.phase,
            path: reader.path.clone(),
            ..node.clone()
        };
        self.emit(&node, &signature, strategy)
    }

    /// Brings what leaves the graph, or goes to the optimizer, where it belongs.
    fn settle(&mut self, id: TensorId, writer: &Reader) -> Result<(), Error> {
        let Some(destination) = self.destinations.get(&id).cloned() else {
            return Ok(());
        };
        let replicated = vec![Placement::Replicate; self.axes.len()];
        for index in destination.gradients {
            let on = self.parameters[index].clone();
            let new = self.fetch(id, &on, writer)?;
            let parameter = &mut self.graph.parameters_mut()[index];
            parameter.gradient = Some(new);
            let role = Role::Gradient(parameter.path.clone());
            if new != id {
                self.set_role(id, Role::Temporary);
                // Backward goes on with what was there: this one may wait for others.
                if let Some(Located::Placed(versions)) = self.located.get_mut(&id) {
                    versions.retain(|version| version.id != new);
                }
            }
            self.set_role(new, role);
            let settled = self.settled.entry(id).or_default();
            if !settled.iter().any(|version| version.on == on) {
                settled.push(Version { id: new, on });
            }
        }
        if destination.is_loss {
            let new = self.fetch(id, &replicated, writer)?;
            self.graph.set_loss(new);
        }
        for index in destination.updates {
            let into = self.graph.updates()[index].into;
            let to = match self.located.get(&into) {
                Some(Located::Placed(versions)) => versions[0].on.clone(),
                _ => replicated.clone(),
            };
            // A state that is the gradient itself.
            let settled = self.settled.get(&id).into_iter().flatten();
            let known = settled
                .clone()
                .find(|version| version.on == to)
                .map(|v| v.id);
            let new = match known {
                Some(new) => new,
                None => self.fetch(id, &to, writer)?,
            };
            self.graph.updates_mut()[index].from = new;
        }
        self.destinations.remove(&id);
        Ok(())
    }

    fn set_role(&mut self, id: TensorId, role: Role) {
        if let Some(value) = self.graph.value_mut(id) {
            value.role = role;
        }
    }

    /// What ledgers call a value that moves, and what it is.
    fn named(&self, id: TensorId) -> (Arc<str>, Payload) {
        if let Some(Role::Parameter(path)) = self.graph.value(id).map(|value| &value.role) {
            return (path.clone(), Payload::Parameter);
        }
        match self.destinations.get(&id) {
            Some(Destination { gradients, .. }) if !gradients.is_empty() => {
                let path = self.graph.parameters()[gradients[0]].path.clone();
                (path, Payload::Gradient)
            }
            Some(Destination { is_loss: true, .. }) => ("loss".into(), Payload::Gradient),
            _ => (format!("%{}", id.value()).into(), Payload::Activation),
        }
    }

    fn described(&self, on: &On) -> Vec<AxisPlacement> {
        let axes = self.axes.iter().zip(on);
        axes.map(|(axis, placement)| AxisPlacement {
            placement: *placement,
            ..axis.clone()
        })
        .collect()
    }

    /// What nothing has written so far, because nothing read it.
    fn finish(mut self) -> Result<(Graph, f64), Error> {
        let mut left: Vec<_> = self.destinations.keys().copied().collect();
        left.sort_unstable();
        let end = Reader {
            phase: Phase::Optimizer,
            path: None,
        };
        for id in left {
            self.settle(id, &end)?;
        }
        self.graph.set_nodes(self.scheduled);
        self.graph.sync_nodes();
        self.graph.prune();
        Ok((self.graph, self.moved))
    }
}

fn on(placements: &[AxisPlacement]) -> On {
    placements.iter().map(|axis| axis.placement).collect()
}
