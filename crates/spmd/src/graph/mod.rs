//! The train step as data: values, and nodes in execution order.
//!
//! A [`Graph`] wraps Burn's own [`OperationIr`]. It adds the information needed to place, schedule and plan a train
//! step:
//!
//! - The list of [`Node`]s **is the schedule**: they run in this order, on every rank. Every node has a [`Phase`].
//!   Collectives have a typed [`Collective`] in addition to their `OperationIr::Custom`.
//! - Every [`Value`] has a shape, a dtype and a [`Role`], which names it by path: parameter, buffer, input, gradient,
//!   optimizer state. At most one node writes each value (static single assignment). Values without a writer come from
//!   outside: see [`Role::is_given`].
//! - An [`Update`] feeds a value computed in one step back into a given value for the next: new parameters, optimizer
//!   states and changed buffers. Updates happen together, after the last node.
//! - Scalars that change from step to step (learning rate, bias correction) are not constants. Their node has a
//!   [`ScalarSlot`], and the executor patches them before each step.
//!
//! Shapes are local to **one rank**: passes that shard a value change its shape.
//!
//! # Liveness
//!
//! A newly traced graph has no [`OperationIr::Drop`] nodes, and every read is marked `ReadOnly`. The liveness pass
//! marks the last read of a value `ReadWrite`, so the backend can free its memory or reuse it in place. Values that
//! cannot be marked get a drop. See [`passes`](crate::passes).
//!
//! ```text
//! %0 parameter fc.weight f32[4, 2]
//! %1 input tokens f32[8, 4]
//! %2 = Float.Matmul(%1, %0)            f32[8, 2]  forward
//! %3 = NumericFloat.Mean(%2)           f32[1]     forward   <- loss
//! ...
//! update %0 <- %9
//! ```

mod activation;
mod arithmetic;
mod collective;
mod draw;
mod fingerprint;
mod flops;
mod held;
mod ir;
mod node;
mod operation;
mod order;
mod owned;
mod pass_states;
mod print;
mod shift;
mod sizes;
mod storage;
mod value;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_ir::{CustomOpIr, OperationIr, TensorId, TensorIr};

pub use arithmetic::touched_bytes;
pub use burn_fsdp_mesh::{AxisPlacement, local_shape};
use burn_fsdp_mesh::{Mesh, Placement};
pub use collective::{Collective, CollectiveKind, CollectivePart, Payload, Stage};
pub use draw::Draw;
pub use flops::Flops;
pub use node::rename;
pub use node::{CustomProfile, Node, Phase, ScalarSlot};
pub use operation::{Trait, is, operation_name};
pub use owned::Absent;
pub use shift::AxisShift;
pub use sizes::Sizes;
pub use storage::{Storage, storage_of};
pub use value::{Owner, Parameter, Role, Update, Value};

pub(crate) use draw::random_of;
pub(crate) use node::set_status;
pub(crate) use print::Type;
pub(crate) use value::{Carried, NamedActivation, cut_of};

use crate::error::Error;
use crate::pass_id::PassId;

/// A train step, or a part of one. See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// The nodes in execution order.
    nodes: Vec<Node>,
    values: BTreeMap<TensorId, Value>,
    /// Data of the values with role [`Role::Constant`].
    constants: BTreeMap<TensorId, Arc<TensorData>>,
    /// Values with role [`Role::Input`], in the order of the batch.
    inputs: Vec<TensorId>,
    /// All parameters and buffers, in visiting order.
    parameters: Vec<Parameter>,
    updates: Vec<Update>,
    results: Results,
    /// Unit of each parameter; empty until units are assigned.
    units: BTreeMap<Arc<str>, Arc<str>>,
    ranks: OnRanks,
    applied: Vec<PassId>,
    /// The sizes on which passes base decisions.
    sizes: Sizes,
    next_id: u64,
}

/// The distribution of a graph over ranks.
#[derive(Debug, Clone, Default)]
struct OnRanks {
    /// The ranks that run the graph; `None` for a single rank's graph.
    mesh: Option<Mesh>,
    /// The placements of values, one per mesh axis, if they were chosen value by value.
    placements: BTreeMap<TensorId, Vec<Placement>>,
    /// The placements of values that are carried over to the next step.
    carried: BTreeMap<TensorId, Carried>,
    /// The owners of values that only one rank has; empty until the order of the nodes is final.
    owned: BTreeMap<TensorId, Owner>,
}

/// The loss and outputs of a step, and the values that the user named in it.
#[derive(Debug, Clone, Default)]
struct Results {
    loss: Option<TensorId>,
    /// Outputs other than the loss, by name.
    outputs: BTreeMap<Arc<str>, TensorId>,
    /// Number of the trace, which determines how the outputs are reassembled.
    template: usize,
    /// Values with requested placements, until they are placed.
    activations: Vec<NamedActivation>,
    /// The forward values that the user wants to recompute, by region.
    regions: Vec<BTreeSet<TensorId>>,
}

impl Graph {
    /// Creates a graph without nodes, for one rank.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the nodes in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Replaces the schedule. Values without a node stay declared until [`prune`](Self::prune).
    pub fn set_nodes(&mut self, nodes: Vec<Node>) {
        self.nodes = nodes;
    }

    /// Removes and returns the schedule. [`set_nodes`](Self::set_nodes) puts it back.
    pub fn take_nodes(&mut self) -> Vec<Node> {
        std::mem::take(&mut self.nodes)
    }

    /// Returns the sizes on which passes base decisions. A pass that used shapes instead would choose a different plan
    /// for the small shapes of a proof.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Sets the sizes on which passes base decisions.
    pub fn decide_by(&mut self, sizes: Sizes) {
        self.sizes = sizes;
    }

    /// Appends a node.
    pub fn push(&mut self, node: Node) {
        self.nodes.push(node);
    }

    /// Returns all values.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &Value> {
        self.values.values()
    }

    /// Returns the value with this id.
    pub fn value(&self, id: TensorId) -> Option<&Value> {
        self.values.get(&id)
    }

    /// Returns the value with this id, mutably. If its shape or type changes, call [`sync_nodes`](Self::sync_nodes) to
    /// update the nodes.
    pub fn value_mut(&mut self, id: TensorId) -> Option<&mut Value> {
        self.values.get_mut(&id)
    }

    /// Makes all later ids larger than the ids of any step, so a graph without an optimizer can run alongside the
    /// states of a step.
    pub(crate) fn number_apart(&mut self) {
        self.next_id = self.next_id.max(1 << 32);
    }

    /// Declares a value, and returns its new id.
    pub fn add_value(
        &mut self,
        shape: impl Into<Vec<usize>>,
        dtype: DType,
        role: Role,
    ) -> TensorId {
        let id = self.fresh_id();
        self.insert_value(Value::new(id, shape, dtype, role));
        id
    }

    /// Declares a value, or replaces the value with the same id.
    pub fn insert_value(&mut self, value: Value) {
        self.next_id = self.next_id.max(value.id.value() + 1);
        self.values.insert(value.id, value);
    }

    /// Returns an unused id.
    fn fresh_id(&mut self) -> TensorId {
        let id = TensorId::new(self.next_id);
        self.next_id += 1;
        id
    }

    /// Returns a value as a read-only operand of an operation.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] if no value has this id.
    pub fn read(&self, id: TensorId) -> Result<TensorIr, Error> {
        let value = self.values.get(&id);
        value
            .map(Value::to_read)
            .ok_or_else(|| Error::Internal(format!("value {} is not declared", id.value())))
    }

    /// Returns a value as an uninitialized operand for an operation to write.
    ///
    /// # Errors
    ///
    /// Same as [`read`](Self::read).
    pub fn write(&self, id: TensorId) -> Result<TensorIr, Error> {
        let TensorIr {
            id, shape, dtype, ..
        } = self.read(id)?;
        Ok(TensorIr::uninit(id, shape, dtype))
    }

    /// Creates a node that runs a collective.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] for values that are not declared.
    pub(crate) fn collective_node(
        &self,
        collective: Collective,
        inputs: &[TensorId],
        outputs: &[TensorId],
        phase: Phase,
    ) -> Result<Node, Error> {
        let inputs = inputs
            .iter()
            .map(|id| self.read(*id))
            .collect::<Result<Vec<_>, _>>()?;
        let outputs = outputs
            .iter()
            .map(|id| self.write(*id))
            .collect::<Result<Vec<_>, _>>()?;
        let custom = CustomOpIr {
            id: collective.name(),
            inputs,
            outputs,
            scalars: Vec::new(),
        };
        let mut node = Node::new(OperationIr::Custom(custom), phase);
        node.collective = Some(collective);
        Ok(node)
    }

    /// Returns the data of the constants, which are the same in every step.
    pub fn constants(&self) -> &BTreeMap<TensorId, Arc<TensorData>> {
        &self.constants
    }

    /// Declares a constant with this id.
    pub fn insert_constant(&mut self, id: TensorId, data: Arc<TensorData>) {
        let shape = data.shape().to_vec();
        self.insert_value(Value::new(id, shape, data.dtype(), Role::Constant));
        self.constants.insert(id, data);
    }

    /// Returns the ids of the batch's tensors, in order.
    pub fn inputs(&self) -> &[TensorId] {
        &self.inputs
    }

    /// Appends a value to the inputs.
    pub fn add_input(&mut self, id: TensorId) {
        self.inputs.push(id);
    }

    /// Returns all parameters and buffers of the module, in visiting order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the parameters and buffers mutably, for passes that shard them.
    pub fn parameters_mut(&mut self) -> &mut Vec<Parameter> {
        &mut self.parameters
    }

    /// Returns the parameter or buffer with this path.
    pub fn parameter(&self, path: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|p| &*p.path == path)
    }

    /// Returns the updates, which happen after the last node.
    pub fn updates(&self) -> &[Update] {
        &self.updates
    }

    /// Returns the updates mutably.
    pub fn updates_mut(&mut self) -> &mut Vec<Update> {
        &mut self.updates
    }

    /// Returns true if an update belongs to the optimizer; updates of buffers belong to forward.
    pub(crate) fn is_of_optimizer(&self, update: &Update) -> bool {
        let role = self.value(update.into).map(|value| &value.role);
        matches!(role, Some(Role::Parameter(_) | Role::State { .. }))
    }

    /// Returns the loss, a value of one element.
    pub fn loss(&self) -> Option<TensorId> {
        self.results.loss
    }

    /// Declares which value is the loss.
    pub fn set_loss(&mut self, id: TensorId) {
        self.results.loss = Some(id);
    }

    /// Returns the outputs of a step other than the loss, by name.
    pub fn outputs(&self) -> &BTreeMap<Arc<str>, TensorId> {
        &self.results.outputs
    }

    /// Declares that a step returns a value under a name.
    pub fn set_output(&mut self, name: Arc<str>, id: TensorId) {
        self.results.outputs.insert(name, id);
    }

    /// Returns the number of the trace.
    pub(crate) fn template(&self) -> usize {
        self.results.template
    }

    /// Sets the number of the trace.
    pub(crate) fn set_template(&mut self, number: usize) {
        self.results.template = number;
    }

    /// Returns the loss and the other outputs of the step.
    pub fn results(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.results
            .loss
            .into_iter()
            .chain(self.results.outputs.values().copied())
    }

    /// Removes the batch, the loss, the outputs and the requested placements. The remaining graph needs no input.
    pub fn detach_batch(&mut self) {
        self.inputs.clear();
        self.results.activations.clear();
        self.results.loss = None;
        self.results.outputs.clear();
    }

    /// Returns the unit of a parameter; `None` before units are assigned.
    pub fn unit(&self, path: &str) -> Option<&str> {
        self.units.get(path).map(AsRef::as_ref)
    }

    /// Declares the unit of each parameter.
    pub fn set_units(&mut self, units: BTreeMap<Arc<str>, Arc<str>>) {
        self.units = units;
    }

    /// Returns the number of ranks that run this graph together.
    pub fn num_ranks(&self) -> usize {
        self.ranks.mesh.as_ref().map_or(1, Mesh::size)
    }

    /// Returns the mesh of the ranks that run this graph; `None` for a single rank's graph.
    pub fn mesh(&self) -> Option<&Mesh> {
        self.ranks.mesh.as_ref()
    }

    /// Declares the mesh of the ranks that run the graph.
    pub fn set_mesh(&mut self, mesh: Mesh) {
        self.ranks.mesh = Some(mesh);
    }

    /// Returns the placements of a value, one per axis of the mesh, if
    /// [`ExpandPlacements`](crate::place::ExpandPlacements) chose them. Values that later passes add have none, unless
    /// they correspond to a value that has them.
    pub fn placements(&self, id: TensorId) -> Option<&[Placement]> {
        self.ranks.placements.get(&id).map(Vec::as_slice)
    }

    /// Returns true if placements were chosen value by value, which implies a joined batch.
    pub(crate) fn is_placed(&self) -> bool {
        !self.ranks.placements.is_empty()
    }

    /// Declares the placements of a value.
    pub(crate) fn place(&mut self, id: TensorId, on: Vec<Placement>) {
        self.ranks.placements.insert(id, on);
    }

    /// Declares the placements of values.
    pub(crate) fn set_placements(&mut self, placements: BTreeMap<TensorId, Vec<Placement>>) {
        self.ranks.placements = placements;
    }

    /// Returns the passes that were applied to this graph, in order.
    pub fn applied(&self) -> &[PassId] {
        &self.applied
    }

    pub(crate) fn mark_applied(&mut self, pass: PassId) {
        self.applied.push(pass);
    }

    /// Returns the index of the node that writes each value.
    pub fn writers(&self) -> BTreeMap<TensorId, usize> {
        let mut writers = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for output in node.outputs() {
                writers.insert(output, index);
            }
        }
        writers
    }

    /// Returns the indices of the nodes that read each value, in order, excluding drops.
    pub fn readers(&self) -> BTreeMap<TensorId, Vec<usize>> {
        let mut readers: BTreeMap<TensorId, Vec<usize>> = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            if node.is_drop() {
                continue;
            }
            for input in node.inputs() {
                let indices = readers.entry(input).or_default();
                if indices.last() != Some(&index) {
                    indices.push(index);
                }
            }
        }
        readers
    }

    /// Writes the shapes and types of the values into all nodes that mention them.
    pub fn sync_nodes(&mut self) {
        let mut nodes = self.take_nodes();
        for node in &mut nodes {
            node::set_values(&mut node.operation, &self.values);
        }
        self.set_nodes(nodes);
    }

    /// Writes the shapes and types of the values into a node that is not yet in the schedule.
    pub fn sync_node(&self, node: &mut Node) {
        node::set_values(&mut node.operation, &self.values);
    }

    /// Removes temporary values, gradients and constants that nothing uses.
    pub fn prune(&mut self) {
        let read: HashSet<TensorId> = self.nodes.iter().flat_map(Node::inputs).collect();
        let mut mentioned = read.clone();
        mentioned.extend(self.kept());
        mentioned.extend(self.nodes.iter().flat_map(Node::outputs));
        let results: HashSet<TensorId> = self.results().collect();
        self.constants
            .retain(|id, _| read.contains(id) || results.contains(id));
        let constants = &self.constants;
        self.values.retain(|id, value| match value.role {
            Role::Constant => constants.contains_key(id),
            Role::Temporary | Role::Gradient(_) => mentioned.contains(id),
            _ => true,
        });
    }

    /// Returns each collective with its node's index, in start order, for comparison between ranks.
    pub fn collectives(&self) -> impl Iterator<Item = (usize, &Collective)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter_map(|(index, node)| {
            let collective = node.collective.as_ref()?;
            (collective.stage != Stage::Wait).then_some((index, collective))
        })
    }

    /// Returns true if the value is given: no node writes it.
    pub fn is_given(&self, id: TensorId) -> bool {
        self.values.get(&id).is_some_and(|v| v.role.is_given())
    }
}
