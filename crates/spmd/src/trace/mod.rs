//! From a module, a loss and an optimizer to a graph.
//!
//! [`trace`] runs the closures once on Burn's capture device, which records operations and computes
//! nothing: parameters and batch are fake tensors of the right shapes. What comes out is a
//! [`Graph`] of forward, backward and optimizer in which every tensor is known by path, without the
//! operations that initialise parameters. The model is not changed, and may be any Burn module.

mod batch;
mod capture;
mod module;
mod optimizer;
mod parameters;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::Optimizer;
use burn::tensor::{Device, Tensor};
use burn_ir::{OperationIr, TensorId};

pub use batch::{Batch, BatchMapper, InputSpec, data_of, specs_of};
pub use optimizer::{HostScalars, OptimizerStep, StepScalars};
pub use parameters::{ParameterSpec, parameters};

pub(crate) use batch::fixed_of;
pub(crate) use capture::Defaults;
pub(crate) use parameters::parameters_with;

use crate::Error;
use crate::graph::{Graph, Node, Parameter, ParameterLayout, Phase, Role, ScalarSlot, Update};
use crate::graph::{operation_name, rename, set_status};
use crate::panics::caught;
use capture::{Captured, Recording, Tape, float_id, record_with};
use module::{Leaf, leaves, updates, with_fakes};

pub(crate) use capture::message;

/// How to trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceConfig {
    /// Which step of the optimizer the graph ends with.
    pub step: OptimizerStep,
    /// Learning rate of the traced step. The graph holds for others, too, as long as the optimizer
    /// uses the same operations for them; see [`StepScalars::structure`].
    pub learning_rate: f64,
}

impl Default for TraceConfig {
    /// A later step at learning rate 0.001.
    fn default() -> Self {
        Self {
            step: OptimizerStep::Next,
            learning_rate: 1e-3,
        }
    }
}

/// Traces a whole train step: `loss` of the module that `init` makes, its gradients, and a step of
/// `optimizer` for every parameter that has one.
///
/// `init` is called with a device on which nothing is computed. Lazy parameters (all of Burn's) are
/// never initialised. Of `batch` only shapes and types are used.
///
/// Values have the same ids in graphs of the same model, whichever step and batch they were traced
/// with, as far as they are parameters, buffers, inputs and states.
///
/// # Errors
///
/// [`Error::Uncapturable`] if the loss reads the value of a tensor, or does something else that the
/// capture device refuses; [`Error::LossShape`] if it is not one number; [`Error::NoGradient`];
/// [`Error::UntraceableOptimizer`]; [`Error::RandomInModule`]; [`Error::StatisticsTwice`].
pub fn trace<M, B, O>(
    init: impl FnOnce(&Device) -> M,
    loss: impl FnOnce(&M, B) -> Tensor<1>,
    optimizer: &O,
    batch: &B,
    config: TraceConfig,
) -> Result<Graph, Error>
where
    M: Module,
    B: Batch,
    O: Optimizer,
{
    let joined = |_: &str, shape: &[usize]| shape.to_vec();
    trace_joined(init, loss, (batch, &joined), None, |leaves| {
        let trained = leaves.iter().filter(|leaf| leaf.is_trained);
        let trained = trained.map(|leaf| (leaf.path.clone(), leaf.shape.clone(), leaf.dtype));
        let mut scalars = HostScalars::new(optimizer, config.learning_rate, trained)?;
        let steps_before = match config.step {
            OptimizerStep::First => 0,
            OptimizerStep::Next => 2,
        };
        for _ in 0..steps_before {
            let step = scalars.peek(config.learning_rate)?;
            scalars.advance(&step, |_| true);
        }
        scalars.peek(config.learning_rate)
    })
}

/// Shape of the tensor to trace for one of the batch, by its name and shape.
pub(crate) type JoinedShape<'a> = &'a dyn Fn(&str, &[usize]) -> Vec<usize>;

/// [`trace`] of a batch whose tensors have other shapes than those at hand, with the default types of a device and
/// the optimizer's step that is given for the tensors of the module.
pub(crate) fn trace_joined<M, B>(
    init: impl FnOnce(&Device) -> M,
    loss: impl FnOnce(&M, B) -> Tensor<1>,
    (batch, joined): (&B, JoinedShape<'_>),
    defaults: Option<Defaults>,
    optimizer: impl FnOnce(&[Leaf]) -> Result<StepScalars, Error>,
) -> Result<Graph, Error>
where
    M: Module,
    B: Batch,
{
    let specs = specs_of(batch)?;
    let recording = record_with("the module", defaults, |device, progress| {
        let tracked = device.clone().autodiff();
        let model = with_fakes(init(&tracked), device, &tracked);
        let before = leaves(&model, None);
        let mut inputs = Vec::new();
        let fake = batch.clone().map(&mut batch::Fake {
            device: &tracked,
            path: batch::Path::default(),
            joined,
            found: |_, captured| inputs.push(captured),
        });
        progress.enter("the loss");
        let value = match caught(|| loss(&model, fake)) {
            Ok(value) => value,
            Err(panic) => match running_twice(&model, &before) {
                Some(path) => return Err(Error::StatisticsTwice { path }),
                None => std::panic::resume_unwind(Box::new(panic.text())),
            },
        };
        let shape = value.dims();
        if shape != [1] {
            return Err(Error::LossShape {
                shape: shape.to_vec(),
            });
        }
        let captured = float_id(&value);
        let tracked_value = value.try_into_primitive::<Tape>();
        let (Some(loss), Ok(value)) = (captured, tracked_value) else {
            return Err(Error::NoGradient);
        };
        progress.enter("the backward pass");
        let mut gradients = value.backward();
        let with_gradients = leaves(&model, Some(&mut gradients));
        progress.enter("the running statistics of the module");
        let (running, updates) = updates(model, &tracked);
        Ok(Captures {
            before,
            with_gradients,
            running,
            updates,
            inputs,
            loss,
        })
    })?;
    let builder = Builder::new(recording, specs)?;
    let step = optimizer(&builder.leaves)?;
    builder.build(&step)
}

/// The module whose running statistics have taken an update inside the loss: it ran a second time, for which
/// Burn moves them in a way that the capture device refuses.
fn running_twice<M: Module>(model: &M, before: &[Leaf]) -> Option<String> {
    let now = leaves(model, None);
    let mut pairs = before.iter().zip(&now);
    let (leaf, _) = pairs.find(|(before, now)| before.captured != now.captured)?;
    let module = leaf.path.rsplit_once('.').map_or("", |(module, _)| module);
    Some(module.to_owned())
}

/// What the closures left on the capture device.
struct Captures {
    before: Vec<Leaf>,
    with_gradients: Vec<Leaf>,
    /// For each tensor, whether it is a running statistic.
    running: Vec<bool>,
    /// What running statistics become.
    updates: Vec<Option<Captured>>,
    inputs: Vec<Option<Captured>>,
    loss: Captured,
}

struct Builder {
    graph: Graph,
    /// From ids of the recording to those of the graph.
    ids: BTreeMap<TensorId, TensorId>,
    operations: Vec<OperationIr>,
    constants: BTreeMap<TensorId, Arc<burn::tensor::TensorData>>,
    leaves: Vec<Leaf>,
    /// The buffers that change, and what they become.
    changed: Vec<(TensorId, TensorId)>,
    loss: TensorId,
}

impl Builder {
    /// Gives every given value a role and an id.
    fn new(recording: Recording<Captures>, specs: Vec<InputSpec>) -> Result<Self, Error> {
        let Captures {
            before,
            with_gradients,
            running,
            updates,
            inputs,
            loss,
        } = recording.result;
        let mut graph = Graph::new();
        let mut ids = BTreeMap::new();
        let mut changed = Vec::new();
        let mut leaves = Vec::new();
        let leaves_of = before.into_iter().zip(with_gradients);
        for (index, (leaf, with_gradient)) in leaves_of.enumerate() {
            let captured = captured(&leaf)?;
            let is_buffer = running[index] || !leaf.is_float;
            let role = match is_buffer {
                true => Role::Buffer(leaf.path.clone()),
                false => Role::Parameter(leaf.path.clone()),
            };
            if graph.parameter(&leaf.path).is_some() {
                return Err(Error::DuplicateName {
                    what: "parameter",
                    name: leaf.path.to_string(),
                });
            }
            // Modules may share statistics: then the second path is an alias of the first.
            if ids.contains_key(&captured.id) {
                continue;
            }
            let value = graph.add_value(leaf.shape.clone(), leaf.dtype, role);
            ids.insert(captured.id, value);
            if let Some(update) = &updates[index] {
                changed.push((value, update.id));
            }
            graph.parameters_mut().push(Parameter {
                path: leaf.path.clone(),
                value,
                shape: leaf.shape.clone(),
                dtype: leaf.dtype,
                layout: ParameterLayout::Whole,
                gradient: None,
                states: Vec::new(),
                is_buffer,
            });
            leaves.push(Leaf {
                gradient: with_gradient.gradient,
                ..leaf
            });
        }
        for (spec, captured) in specs.into_iter().zip(inputs) {
            let captured = captured.ok_or_else(|| {
                Error::Internal("an input is not on the capture device".to_owned())
            })?;
            let role = Role::Input(spec.name.as_str().into());
            let value = graph.add_value(captured.shape, captured.dtype, role);
            graph.add_input(value);
            ids.insert(captured.id, value);
        }
        Ok(Self {
            graph,
            ids,
            operations: recording.operations,
            constants: recording
                .values
                .into_iter()
                .map(|(id, data)| (id, Arc::new(data)))
                .collect(),
            leaves,
            changed,
            loss: loss.id,
        })
    }

    fn build(mut self, step: &StepScalars) -> Result<Graph, Error> {
        if self.leaves.iter().all(|leaf| leaf.gradient.is_none()) {
            return Err(Error::NoGradient);
        }
        self.add_states(step);
        self.add_forward_and_backward()?;
        for index in 0..self.leaves.len() {
            self.add_optimizer(index, step)?;
        }
        let mut graph = self.graph;
        graph.prune();
        Ok(graph)
    }

    /// Declares the optimizer's states, before anything whose number depends on the batch: of all trained
    /// parameters, because other batches may give gradients to others of them.
    fn add_states(&mut self, step: &StepScalars) {
        for (index, leaf) in self.leaves.iter().enumerate() {
            let of_parameter = step.of(&leaf.path);
            for slot in of_parameter.map_or(&[][..], |step| step.slots.as_slice()) {
                let role = Role::State {
                    path: leaf.path.clone(),
                    slot: slot.name.clone(),
                };
                let id = self.graph.add_value(slot.shape.clone(), slot.dtype, role);
                self.graph.parameters_mut()[index].states.push(id);
            }
        }
    }

    /// The recorded operations that the loss, the gradients and the changed buffers need.
    fn add_forward_and_backward(&mut self) -> Result<(), Error> {
        let gradients: BTreeMap<TensorId, Arc<str>> = self
            .leaves
            .iter()
            .filter_map(|leaf| Some((leaf.gradient.as_ref()?.id, leaf.path.clone())))
            .collect();
        let wanted = gradients.keys().copied();
        let wanted = wanted
            .chain(self.changed.iter().map(|(_, after)| *after))
            .chain([self.loss]);
        let operations = needed(
            std::mem::take(&mut self.operations),
            &self.ids,
            wanted.collect(),
        )?;
        let last_forward = operations
            .iter()
            .rposition(|op| op.outputs().any(|o| o.id == self.loss));
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
        let loss = id_of(&self.ids, self.loss)?;
        self.graph.set_loss(loss);
        for (into, after) in std::mem::take(&mut self.changed) {
            let from = id_of(&self.ids, after)?;
            self.graph.updates_mut().push(Update { into, from });
        }
        Ok(())
    }

    /// The optimizer's step for one parameter, if it has a gradient.
    fn add_optimizer(&mut self, index: usize, step: &StepScalars) -> Result<(), Error> {
        let missing = || Error::Internal("an optimizer reads what nothing writes".to_owned());
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
            node.path = Some(leaf.path.clone());
            node.scalars = (!node.scalar_values().is_empty()).then_some(ScalarSlot { position });
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
            if self.ids.contains_key(&input.id) {
                continue;
            }
            if let Some(data) = self.constants.get(&input.id) {
                let shape = data.shape().to_vec();
                let id = self.graph.add_value(shape, data.dtype(), Role::Constant);
                self.graph.insert_constant(id, data.clone());
                self.ids.insert(input.id, id);
            }
        }
    }

    fn node(&self, mut operation: OperationIr, phase: Phase) -> Node {
        rename(&mut operation, &self.ids);
        read_only(&mut operation);
        Node::new(operation, phase)
    }
}

fn captured(leaf: &Leaf) -> Result<Captured, Error> {
    leaf.captured.clone().ok_or_else(|| Error::Uncapturable {
        stage: "the module",
        produced_by: None,
        reason: format!(
            "its tensor \"{}\" is not on the device that init was given",
            leaf.path
        ),
    })
}

fn read_only(operation: &mut OperationIr) {
    set_status(operation, |_| burn_ir::TensorStatus::ReadOnly);
}

/// The operations that `wanted` depends on, cut at the given tensors; random numbers that the loss
/// draws stay even if unused, because the numbers after them depend on it.
///
/// # Errors
///
/// [`Error::RandomInModule`] if they depend on random numbers of the module's initialisation: as operations
/// of the step they would be other ones in every step.
fn needed(
    operations: Vec<OperationIr>,
    given: &BTreeMap<TensorId, TensorId>,
    mut wanted: BTreeSet<TensorId>,
) -> Result<Vec<OperationIr>, Error> {
    // Everything before the inputs were made belongs to the module's initialisation.
    let made = |op: &OperationIr| op.outputs().any(|output| given.contains_key(&output.id));
    let first = operations
        .iter()
        .rposition(made)
        .map_or(0, |index| index + 1);
    let mut kept = Vec::new();
    for (index, operation) in operations.into_iter().enumerate().rev() {
        if matches!(operation, OperationIr::Init(_) | OperationIr::Drop(_)) {
            continue;
        }
        let is_random = Node::new(operation.clone(), Phase::Forward).is_opaque();
        let is_needed = operation
            .outputs()
            .any(|output| wanted.contains(&output.id) && !given.contains_key(&output.id));
        if is_needed && is_random && index < first {
            let shape = operation.outputs().next().map(|out| out.shape.to_vec());
            return Err(Error::RandomInModule {
                operation: operation_name(&operation),
                shape: shape.unwrap_or_default(),
            });
        }
        if is_needed || is_random && index >= first {
            wanted.extend(operation.inputs().map(|input| input.id));
            kept.push(operation);
        }
    }
    kept.reverse();
    Ok(kept)
}
