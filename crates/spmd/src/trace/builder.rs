//! The builder: turns a recording into a graph.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::TensorData;
use burn_fsdp_mesh::Layout;
use burn_ir::{OperationIr, TensorId};

use super::activation::Activations;
use super::batch::InputSpec;
use super::capture::{Captured, Recording};
use super::module::Leaf;
use super::needed::needed;
use super::optimizer::{self, StepScalars};
use super::outputs::{PREFIX, Taken};
use super::region::{self, Marks};
use super::statistics;
use crate::error::Error;
use crate::graph::{
    CustomProfile, Graph, NamedActivation, Node, Parameter, Phase, Role, ScalarSlot,
};
use crate::graph::{Trait, Update, is, rename, set_status};
use crate::low_bit::StateOperation;

/// The tensors of the module, the batch and the loss on the capture device.
pub(super) struct Captures {
    pub(super) before: Vec<Leaf>,
    pub(super) with_gradients: Vec<Leaf>,
    /// True for each tensor that is a running statistic, in the order of the leaves.
    pub(super) running: Vec<bool>,
    /// The new value of each running statistic that has one, in the order of the leaves.
    pub(super) updates: Vec<Option<Captured>>,
    pub(super) inputs: Vec<Option<Captured>>,
    /// `None` in an evaluation.
    pub(super) loss: Option<Captured>,
    /// The tensors that a step returns in addition to the loss.
    pub(super) outputs: Taken,
    /// Activations with requested placements.
    pub(super) activations: Activations,
    /// Regions to recompute.
    pub(super) regions: Vec<Marks>,
    /// True if new tensors had the parameters' compute type.
    pub(super) is_narrow: bool,
}

/// A graph under construction.
pub(super) struct Builder {
    graph: Graph,
    /// Maps the recording's ids to the graph's ids.
    ids: BTreeMap<TensorId, TensorId>,
    operations: Vec<OperationIr>,
    constants: BTreeMap<TensorId, Arc<TensorData>>,
    pub(super) leaves: Vec<Leaf>,
    /// The tensors of the batch.
    inputs: Vec<(InputSpec, Captured)>,
    /// The buffers that change, with their new values.
    changed: Vec<(TensorId, TensorId)>,
    loss: Option<TensorId>,
    outputs: Taken,
    activations: Activations,
    /// The recorded values of each region.
    regions: Vec<BTreeSet<TensorId>>,
    is_narrow: bool,
}

impl Builder {
    /// Creates a builder, and assigns a role and an id to every parameter and buffer.
    pub(super) fn new(
        recording: Recording<Captures>,
        specs: Vec<InputSpec>,
    ) -> Result<Self, Error> {
        let Captures {
            before,
            with_gradients,
            running,
            updates,
            inputs,
            loss,
            outputs,
            activations,
            regions,
            is_narrow,
        } = recording.result;
        let (mut operations, mut updates) = (recording.operations, updates);
        statistics::widen(&mut operations, &before, &mut updates);
        let mut graph = Graph::new();
        let mut ids = BTreeMap::new();
        let mut changed = Vec::new();
        let mut leaves = Vec::new();
        let leaves_of = before.into_iter().zip(with_gradients);
        for (index, (leaf, with_gradient)) in leaves_of.enumerate() {
            let captured = captured(&leaf)?;
            let is_buffer = running[index] || !leaf.is_float;
            let role = if is_buffer {
                Role::Buffer(leaf.path.clone())
            } else {
                Role::Parameter(leaf.path.clone())
            };
            check_new(&graph, &leaf.path)?;
            // Modules may share statistics. The second path is then an alias of the first.
            if ids.contains_key(&captured.id) {
                continue;
            }
            let value = graph.add_value(leaf.shape.clone(), leaf.dtype, role);
            ids.insert(captured.id, value);
            if let Some(update) = &updates[index] {
                changed.push((value, update.id));
            }
            let parameter = parameter(&leaf, value, is_buffer);
            graph.parameters_mut().push(parameter);
            leaves.push(Leaf {
                gradient: with_gradient.gradient,
                ..leaf
            });
        }
        let input = |(spec, captured): (InputSpec, Option<Captured>)| {
            let outside = || Error::Internal("an input is not on the capture device".to_owned());
            Ok((spec, captured.ok_or_else(outside)?))
        };
        let inputs = specs.into_iter().zip(inputs).map(input);
        Ok(Self {
            graph,
            ids,
            inputs: inputs.collect::<Result<_, Error>>()?,
            regions: region::values(&operations, &regions),
            operations,
            is_narrow,
            constants: recording
                .values
                .into_iter()
                .map(|(id, data)| (id, Arc::new(data)))
                .collect(),
            leaves,
            changed,
            loss: loss.map(|loss| loss.id),
            outputs,
            activations,
        })
    }

    pub(super) fn build(mut self, step: &StepScalars) -> Result<Graph, Error> {
        if self.leaves.iter().all(|leaf| leaf.gradient.is_none()) {
            return Err(Error::NoGradient);
        }
        self.add_states(step);
        self.add_inputs();
        self.add_forward_and_backward()?;
        self.add_outputs()?;
        self.add_activations()?;
        for index in 0..self.leaves.len() {
            self.add_optimizer(index, step)?;
        }
        let mut graph = self.graph;
        graph.prune();
        Ok(graph)
    }

    /// Returns the graph of an evaluation: the parameters, and the operations that the outputs need.
    pub(super) fn build_forward(mut self) -> Result<Graph, Error> {
        self.graph.number_apart();
        self.add_inputs();
        self.add_forward_and_backward()?;
        self.add_outputs()?;
        self.add_activations()?;
        let mut graph = self.graph;
        graph.prune();
        Ok(graph)
    }

    /// Declares the optimizer states. They precede everything that depends on the batch, so each state has the same id
    /// in the graphs of all batches. All trained parameters get states, because another batch may give gradients to
    /// other parameters.
    fn add_states(&mut self, step: &StepScalars) {
        for (index, leaf) in self.leaves.iter().enumerate() {
            let of_parameter = step.of(&leaf.path);
            for slot in of_parameter.map_or(&[][..], |step| step.slots.as_slice()) {
                let role = Role::State {
                    path: leaf.path.clone(),
                    slot: slot.name.clone(),
                };
                let (shape, dtype) = slot.kept();
                let id = self.graph.add_value(shape, dtype, role);
                let parameter = &mut self.graph.parameters_mut()[index];
                parameter.states.push(id);
                parameter.state_format = slot.format;
                if slot.shape != parameter.shape {
                    parameter.whole_states.push(id);
                }
            }
        }
    }

    /// Declares the tensors of the batch. Their number depends on the options and lengths in the batch.
    fn add_inputs(&mut self) {
        for (spec, captured) in std::mem::take(&mut self.inputs) {
            let role = Role::Input(spec.name.as_str().into());
            let value = self.graph.add_value(captured.shape, captured.dtype, role);
            self.graph.add_input(value);
            self.ids.insert(captured.id, value);
        }
    }

    /// Adds the recorded operations that the results, gradients, changed buffers and named activations need.
    fn add_forward_and_backward(&mut self) -> Result<(), Error> {
        let gradients: BTreeMap<TensorId, Arc<str>> = self
            .leaves
            .iter()
            .filter_map(|leaf| Some((leaf.gradient.as_ref()?.id, leaf.path.clone())))
            .collect();
        let wanted = gradients.keys().copied();
        let wanted = wanted
            .chain(self.changed.iter().map(|(_, after)| *after))
            .chain(self.results())
            .chain(
                self.activations
                    .iter()
                    .filter_map(|(_, activation)| Some(activation.as_ref()?.id)),
            );
        let wanted = wanted.collect();
        let operations = std::mem::take(&mut self.operations);
        let narrow = self.is_narrow.then_some(&self.constants);
        let operations = needed(operations, &self.ids, wanted, narrow)?;
        let last_forward = operations
            .iter()
            .rposition(|op| op.outputs().any(|o| self.results().any(|id| id == o.id)));
        for (index, operation) in operations.into_iter().enumerate() {
            let phase = match last_forward {
                Some(last) if index > last => Phase::Backward,
                _ => Phase::Forward,
            };
            self.declare_constants(&operation);
            for output in operation.outputs() {
                let role = match gradients.get(&output.id) {
                    Some(path) => Role::Gradient(path.clone()),
                    None => Role::Temporary,
                };
                let id = self
                    .graph
                    .add_value(output.shape.to_vec(), output.dtype, role);
                self.ids.insert(output.id, id);
            }
            let node = self.node(operation, phase);
            self.graph.push(node);
        }
        let id_of = |ids: &BTreeMap<_, _>, id: TensorId| {
            ids.get(&id)
                .copied()
                .ok_or_else(|| Error::Internal(format!("{id} was not recorded")))
        };
        region::declare(
            &mut self.graph,
            std::mem::take(&mut self.regions),
            &self.ids,
        );
        if let Some(loss) = self.loss {
            let loss = id_of(&self.ids, loss)?;
            self.graph.set_loss(loss);
        }
        for (into, after) in std::mem::take(&mut self.changed) {
            let from = id_of(&self.ids, after)?;
            self.graph.updates_mut().push(Update { into, from });
        }
        Ok(())
    }

    /// Returns the loss and the other outputs on the capture device.
    fn results(&self) -> impl Iterator<Item = TensorId> + '_ {
        let outputs = self
            .outputs
            .iter()
            .filter_map(|(_, captured)| captured.as_ref());
        self.loss
            .into_iter()
            .chain(outputs.map(|captured| captured.id))
    }

    /// Returns true if a value is a parameter, or a view or a cast of one. Such a value exists only while it is in use.
    fn is_of_parameter(&self, mut id: TensorId) -> bool {
        for node in self.graph.nodes().iter().rev() {
            let is_view = is(&node.operation, Trait::View) || is(&node.operation, Trait::Cast);
            if is_view && node.outputs().any(|output| output == id) {
                id = node.inputs().next().unwrap_or(id);
            }
        }
        let role = self.graph.value(id).map(|value| &value.role);
        matches!(role, Some(Role::Parameter(_)))
    }

    /// Returns the value of a tensor that the closure returned, or the reason why there is none: `of_parameter` if it
    /// is a parameter.
    fn computed(
        &self,
        captured: Option<&Captured>,
        of_parameter: &'static str,
    ) -> Result<TensorId, &'static str> {
        let captured = captured.ok_or("it is on another device")?;
        let id = self.ids.get(&captured.id).copied();
        let id = id.ok_or("no recorded operation computes it")?;
        if self.is_of_parameter(id) {
            Err(of_parameter)
        } else {
            Ok(id)
        }
    }

    /// Declares the outputs other than the loss.
    fn add_outputs(&mut self) -> Result<(), Error> {
        for (name, captured) in std::mem::take(&mut self.outputs) {
            let refused = |reason| Error::Output {
                name: name.strip_prefix(PREFIX).unwrap_or(&name).to_owned(),
                reason,
            };
            if let Some(captured) = &captured {
                self.declare_constant(captured.id);
            }
            let of_parameter =
                "it is a parameter or a view of one; read it with CompiledStep::parameter";
            let id = self.computed(captured.as_ref(), of_parameter);
            let id = id.map_err(refused)?;
            if self.graph.outputs().contains_key(&name) {
                return Err(Error::DuplicateName {
                    what: "output",
                    name: name.to_string(),
                });
            }
            self.graph.set_output(name, id);
        }
        Ok(())
    }

    /// Declares the activations with requested placements.
    fn add_activations(&mut self) -> Result<(), Error> {
        for (name, captured) in std::mem::take(&mut self.activations) {
            let shape = captured.as_ref().map(|captured| captured.shape.clone());
            let refused = |reason: &str| Error::Placement {
                what: "activation",
                name: name.to_string(),
                placement: "placed by its name".to_owned(),
                shape: shape.unwrap_or_default(),
                reason: reason.to_owned(),
            };
            let of_parameter =
                "it is a parameter or a view of one; place it with Expand::parameter";
            let value = self.computed(captured.as_ref(), of_parameter);
            let value = value.map_err(refused)?;
            self.graph.add_activation(NamedActivation { name, value });
        }
        Ok(())
    }

    /// Adds the optimizer's step for one parameter, if it has a gradient.
    fn add_optimizer(&mut self, index: usize, step: &StepScalars) -> Result<(), Error> {
        let missing =
            || Error::Internal("an optimizer reads a value that nothing writes".to_owned());
        let leaf = self.leaves[index].clone();
        let Some(gradient) = leaf.gradient.as_ref() else {
            return Ok(());
        };
        let gradient = *self.ids.get(&gradient.id).ok_or_else(missing)?;
        let step = step.of(&leaf.path).ok_or_else(|| {
            Error::Internal(format!("there is no optimizer for parameter {}", leaf.path))
        })?;
        let parameter = &mut self.graph.parameters_mut()[index];
        parameter.gradient = Some(gradient);
        let (value, states) = (parameter.value, parameter.states.clone());
        let mut ids: BTreeMap<TensorId, TensorId> = [
            (optimizer::parameter_id(), value),
            (optimizer::gradient_id(), gradient),
        ]
        .into();
        let slots = states.iter().enumerate();
        ids.extend(slots.map(|(slot, id)| (optimizer::state_id(slot), *id)));
        for (position, mut operation) in step.operations().enumerate() {
            for output in operation.outputs() {
                let id = self
                    .graph
                    .add_value(output.shape.to_vec(), output.dtype, Role::Temporary);
                ids.insert(output.id, id);
            }
            rename(&mut operation, &ids);
            let mut node = Node::new(operation, Phase::Optimizer);
            node.custom = StateOperation::of(&node.operation).map(|_| CustomProfile::default());
            node.path = Some(leaf.path.clone());
            let len = node.scalar_values().len();
            let first = 0;
            let slot = (len > 0).then_some(ScalarSlot {
                position,
                first,
                len,
                is_of_before: false,
            });
            node.scalars.extend(slot);
            self.graph.push(node);
        }
        let structure = step.structure();
        let new_states = structure.new_states.iter();
        let new_states = new_states.map(|(slot, from)| (states[*slot], *from));
        let new = [(value, structure.new_parameter)].into_iter();
        for (into, from) in new.chain(new_states) {
            let from = *ids.get(&from).ok_or_else(missing)?;
            if into != from {
                self.graph.updates_mut().push(Update { into, from });
            }
        }
        Ok(())
    }

    fn declare_constants(&mut self, operation: &OperationIr) {
        for input in operation.inputs() {
            self.declare_constant(input.id);
        }
    }

    fn declare_constant(&mut self, captured: TensorId) {
        if self.ids.contains_key(&captured) {
            return;
        }
        if let Some(data) = self.constants.get(&captured) {
            let shape = data.shape().to_vec();
            let id = self.graph.add_value(shape, data.dtype(), Role::Constant);
            self.graph.insert_constant(id, data.clone());
            self.ids.insert(captured, id);
        }
    }

    fn node(&self, mut operation: OperationIr, phase: Phase) -> Node {
        rename(&mut operation, &self.ids);
        read_only(&mut operation);
        Node::new(operation, phase)
    }
}

/// Returns the graph's description of a module tensor.
fn parameter(leaf: &Leaf, value: TensorId, is_buffer: bool) -> Parameter {
    Parameter {
        path: leaf.path.clone(),
        value,
        shape: leaf.shape.clone(),
        dtype: leaf.dtype,
        layout: Layout::one_rank(),
        gradient: None,
        states: Vec::new(),
        whole_states: Vec::new(),
        state_format: None,
        is_buffer,
    }
}

fn check_new(graph: &Graph, path: &str) -> Result<(), Error> {
    match graph.parameter(path) {
        None => Ok(()),
        Some(_) => Err(Error::DuplicateName {
            what: "parameter",
            name: path.to_owned(),
        }),
    }
}

fn captured(leaf: &Leaf) -> Result<Captured, Error> {
    leaf.captured.clone().ok_or_else(|| Error::Uncapturable {
        stage: "the module",
        produced_by: None,
        reason: format!(
            "its tensor \"{}\" is not on the device passed to `init`",
            leaf.path
        ),
    })
}

fn read_only(operation: &mut OperationIr) {
    set_status(operation, |_| burn_ir::TensorStatus::ReadOnly);
}
