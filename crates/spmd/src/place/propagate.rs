//! The pass that places every value of a step.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::{Cut, Layout, Mesh, Placement};
use burn_ir::{BaseOperationIr, OperationIr, TensorId};

use super::expand::Expand;
use super::located::{Located, Reader, Values, Version, on};
use super::padding::{Padding, padded_dim};
use super::placer::{Destination, Placer};
use super::rules;
use super::signature::Signature;
use crate::Precision;
use crate::error::Error;
use crate::graph::{AxisPlacement, Graph, NamedActivation, Node, Phase, Role, local_shape};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that inserts collectives by placement: it turns one rank's graph, over the joined batch, into the graph of
/// each rank of a mesh. See the [module](super).
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
    /// The user's placements, from which all others follow.
    pub expand: Expand,
    /// The mesh of the ranks.
    pub mesh: Mesh,
    /// Types in which gradients are sent. The graph already contains the casts of parameters.
    pub precision: Precision,
}

impl ExpandPlacements {
    /// Creates the pass. Gradients are sent in the types in which they are computed.
    pub fn new(expand: Expand, mesh: Mesh) -> Self {
        let precision = Precision::default();
        Self {
            expand,
            mesh,
            precision,
        }
    }

    /// Sets the types in which gradients are sent.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }
}

impl GraphTransform for ExpandPlacements {
    fn id(&self) -> PassId {
        PassId::InsertCollectives
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let nodes = graph.take_nodes();
        let mut placer = self.begin(graph)?;
        placer.look_ahead(&nodes);
        for (index, node) in nodes.into_iter().enumerate() {
            let signature = rules::signature(&node.operation);
            if let Some(reason) = signature.fault() {
                return Err(Error::InvalidGraph {
                    rule: "an operation's dims match its rule",
                    after: None,
                    node: index,
                    operation: node.name(),
                    reason,
                });
            }
            placer.place(&node, &signature)?;
        }
        placer.finish()
    }
}

/// Whole shapes and types of values.
type Shapes = HashMap<TensorId, (Vec<usize>, DType)>;

/// A graph with its nodes' signatures, to be placed many times.
#[derive(Debug)]
pub(super) struct Signed {
    /// The graph without its nodes.
    graph: Graph,
    nodes: Vec<(Node, Signature)>,
}

impl Signed {
    pub(super) fn new(mut graph: Graph) -> Self {
        let sign = |node: Node| {
            let signature = rules::signature(&node.operation);
            (node, signature)
        };
        let nodes = graph.take_nodes().into_iter().map(sign).collect();
        Self { graph, nodes }
    }
}

impl ExpandPlacements {
    /// Returns the number of bytes that a rank receives in a step; `None` if it exceeds `limit`.
    pub(super) fn received(&self, signed: &Signed, limit: f64) -> Result<Option<f64>, Error> {
        let mut placer = self.begin(signed.graph.clone())?;
        for (node, signature) in &signed.nodes {
            placer.place(node, signature)?;
            if placer.moved > limit {
                return Ok(None);
            }
        }
        placer.settle_rest()?;
        Ok((placer.moved <= limit).then_some(placer.moved))
    }

    /// Creates the placer, in which only given values have placements so far.
    fn begin(&self, mut graph: Graph) -> Result<Placer, Error> {
        graph.set_mesh(self.mesh.clone());
        let (expand, mesh) = (&self.expand, &self.mesh);
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
            let placements = if parameter.is_buffer {
                axes.clone()
            } else {
                expand.of_parameter(mesh, &parameter.path, &parameter.shape)?
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
            parameter.layout = Layout {
                placements: placements.into_iter().map(|axis| axis.placement).collect(),
                cut: Cut::Dims,
                owner: None,
            };
        }
        given.extend(self.inputs(&graph)?);
        add_results(&mut graph, &mut destinations);
        let located = locate(&mut graph, &whole, |id| given.get(id).unwrap_or(&axes));
        let is_padded = self.is_padded(&axes, (&graph, &whole), &destinations);
        let values = Values {
            axes,
            graph,
            whole,
            located,
            asked: HashMap::new(),
            is_padded,
        };
        let mut placer = Placer {
            expand: self.expand.clone(),
            precision: self.precision.clone(),
            values,
            scheduled: Vec::new(),
            destinations,
            parameters,
            settled: HashMap::new(),
            is_optimizing: false,
            before: BTreeMap::new(),
            moved: 0.0,
            padding: Padding::default(),
        };
        placer.settle_given()?;
        Ok(placer)
    }

    /// Returns, for each axis, whether the user's placements shard a dim on it that does not divide evenly.
    fn is_padded(
        &self,
        axes: &[AxisPlacement],
        (graph, whole): (&Graph, &Shapes),
        destinations: &HashMap<TensorId, Destination>,
    ) -> Vec<bool> {
        let cuts = |placement: Placement, shape: &[usize], axis: &AxisPlacement| {
            let axis = AxisPlacement {
                placement,
                ..axis.clone()
            };
            padded_dim(&axis, shape).is_some()
        };
        let is_padded = |(index, axis): (usize, &AxisPlacement)| {
            let mut parameters = graph.parameters().iter();
            let is_cut = parameters.any(|parameter| {
                let placements = parameter.layout.placements.get(index);
                placements.is_some_and(|placement| cuts(*placement, &parameter.shape, axis))
            });
            is_cut
                || destinations.iter().any(|(id, destination)| {
                    let shape = whole.get(id).map(|(shape, _)| shape.as_slice());
                    let mut names = destination.activations.iter();
                    names.any(|name| {
                        let asked = self.expand.asked(name, axes)[index];
                        asked.is_some_and(|asked| cuts(asked, shape.unwrap_or_default(), axis))
                    })
                })
        };
        axes.iter().enumerate().map(is_padded).collect()
    }

    /// Returns the placements of the tensors of the batch.
    fn inputs(&self, graph: &Graph) -> Result<BTreeMap<TensorId, Vec<AxisPlacement>>, Error> {
        let mut given = BTreeMap::new();
        for input in graph.inputs() {
            let Some(value) = graph.value(*input) else {
                continue;
            };
            let name = match &value.role {
                Role::Input(name) => name.clone(),
                other => Arc::from(other.to_string()),
            };
            // The trace covers the joined batch.
            let shape = value.shape.clone();
            let placements = self.expand.of_joined_input(&self.mesh, &name, &shape)?;
            given.insert(*input, placements);
        }
        Ok(given)
    }
}

/// Adds the results, the named values, and the sources of updates to the destinations.
fn add_results(graph: &mut Graph, destinations: &mut HashMap<TensorId, Destination>) {
    for (index, update) in graph.updates().iter().enumerate() {
        let destination = destinations.entry(update.from).or_default();
        destination.updates.push(index);
    }
    if let Some(loss) = graph.loss() {
        destinations.entry(loss).or_default().is_loss = true;
    }
    for (name, id) in graph.outputs() {
        let destination = destinations.entry(*id).or_default();
        destination.outputs.push(name.clone());
    }
    for NamedActivation { name, value } in graph.take_activations() {
        destinations
            .entry(value)
            .or_default()
            .activations
            .push(name);
    }
}

/// Sets every given value to the shape of a rank's part, and returns the given values with their placements.
fn locate<'a>(
    graph: &mut Graph,
    whole: &Shapes,
    given: impl Fn(&TensorId) -> &'a Vec<AxisPlacement>,
) -> HashMap<TensorId, Located> {
    let mut located = HashMap::new();
    for (id, (shape, _)) in whole {
        if !graph.is_given(*id) {
            continue;
        }
        let placements = given(id);
        if let Some(value) = graph.value_mut(*id) {
            value.shape = local_shape(shape, placements);
        }
        let version = Version {
            id: *id,
            on: on(placements),
        };
        located.insert(*id, Located::Placed(vec![version]));
    }
    located
}

impl Placer {
    /// Records the placements requested for named activations, and for the values from which they are computed element
    /// by element. For example, if a product plus a bias is named, its addends are reduced directly to the requested
    /// placement, and are never whole.
    fn look_ahead(&mut self, nodes: &[Node]) {
        let axes = &self.values.axes;
        for (id, destination) in &self.destinations {
            for name in &destination.activations {
                let asked = self.expand.asked(name, axes);
                self.values.asked.entry(*id).or_insert(asked);
            }
        }
        for node in nodes
            .iter()
            .rev()
            .filter(|node| rules::is_pointwise(&node.operation))
        {
            let mut outputs = node.outputs();
            let Some((output, asked)) =
                outputs.find_map(|id| Some((id, self.values.asked.get(&id)?.clone())))
            else {
                continue;
            };
            let whole = &self.values.whole;
            let shape = |id: &TensorId| whole.get(id).map(|(shape, _)| shape);
            for input in node.inputs().filter(|input| shape(input) == shape(&output)) {
                self.values
                    .asked
                    .entry(input)
                    .or_insert_with(|| asked.clone());
            }
        }
    }

    fn place(&mut self, node: &Node, signature: &Signature) -> Result<(), Error> {
        if node.phase == Phase::Optimizer && !self.is_optimizing {
            self.begin_optimizer();
        }
        if self.is_made_of_nothing(node) {
            let node = Arc::new(node.clone());
            for output in node.outputs() {
                self.values
                    .located
                    .insert(output, Located::Floating(node.clone()));
                self.settle_activation(output, &Reader::of(&node))?;
            }
            return Ok(());
        }
        if self.sums_over_cut(node)
            && let Some(nodes) = rules::without_bias(&mut self.values.graph, node)?
        {
            for node in nodes {
                for tensor in node.operation.outputs() {
                    let known = (tensor.shape.to_vec(), tensor.dtype);
                    self.values.whole.insert(tensor.id, known);
                }
                self.place(&node, &rules::signature(&node.operation))?;
            }
            return Ok(());
        }
        if let Some(axis) = self.values.axes.iter().find(|axis| axis.num_ranks > 1)
            && node.is_opaque()
            && node.draw.is_none()
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
        if self.makes_gradient(node) {
            // The cast runs on addends. They are then reduced, in the type in which gradients are sent.
            let linear = signature.clone().linear_in(node.operation.inputs());
            let strategy = self.values.choose(node, &linear)?;
            return self.emit(node, &linear, strategy);
        }
        let strategy = self.values.choose(node, signature)?;
        self.emit(node, signature, strategy)
    }

    /// Returns true if a node can be deferred until a reader needs its outputs. All of its inputs, if any, must also be
    /// deferred.
    fn is_made_of_nothing(&self, node: &Node) -> bool {
        // A single rank draws random numbers in the order of the graph.
        if self.values.axes.iter().all(|axis| axis.num_ranks == 1) {
            return false;
        }
        let floats = |id| matches!(self.values.located.get(&id), Some(Located::Floating(_)));
        // The faster check comes first, and few nodes pass it.
        node.inputs().all(floats) && rules::may_wait(&node.operation)
    }

    /// Returns true if the node casts a gradient to the type of its parameter.
    fn makes_gradient(&self, node: &Node) -> bool {
        let OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) = &node.operation else {
            return false;
        };
        let destination = self.destinations.get(&cast.out.id);
        destination.is_some_and(|destination| !destination.gradients.is_empty())
    }

    /// Returns true if the node is a linear layer whose weight is sharded along the dim that it sums over.
    fn sums_over_cut(&self, node: &Node) -> bool {
        let OperationIr::Module(burn_ir::ModuleOperationIr::Linear(op)) = &node.operation else {
            return false;
        };
        match self.values.located.get(&op.weight.id) {
            Some(Located::Placed(versions)) => {
                versions.len() == 1 && versions[0].on.contains(&Placement::Shard(0))
            }
            _ => false,
        }
    }
}
