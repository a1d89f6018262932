//! The tracer: builds a graph from a module, a loss and an optimizer.
//!
//! [`trace`] runs the closures on Burn's capture device, which records operations and computes nothing. Parameters and
//! batch are fake tensors of the right shapes. The result is a [`Graph`] of forward, backward and optimizer that
//! identifies the model's tensors by path. It does not include the operations that initialize parameters. The model is
//! not changed, and can be any Burn module.

mod activation;
mod batch;
mod builder;
mod capture;
mod forward;
mod module;
mod narrow;
mod needed;
mod optimizer;
mod options;
mod outputs;
mod parameters;
mod region;
mod statistics;
mod types;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_tensors::is_half;

pub use burn_fsdp_tensors::{Batch, BatchMapper, cast_floats};

pub use activation::named_activation;
pub use batch::{InputSpec, specs_of};
pub(crate) use batch::{InputValue, values_of};
pub use optimizer::{OptimizerGroups, OptimizerStep, StepScalars};
pub use outputs::Loss;
pub use parameters::{ParameterSpec, parameters};
pub use region::{is_traced, traced_region};

pub(crate) use batch::{JoinedShape, fixed_of};
pub(crate) use capture::Defaults;
pub(crate) use forward::trace_forward;
pub(crate) use optimizer::{HostScalars, Slot, Trained, base_rate};
pub(crate) use options::TraceOptions;
pub(crate) use outputs::{OutputValue, fill};
pub(crate) use parameters::parameters_with;

use crate::Precision;
use crate::error::Error;
use crate::graph::Graph;
use crate::panics::caught;
use activation::Naming;
use builder::{Builder, Captures};
use capture::{Tape, float_id, record_with};
use module::{Leaf, computing, leaves, updates, with_fakes, with_running};
use region::Regions;
use types::by_types;

/// The settings of [`trace`].
#[derive(Debug, Clone, PartialEq)]
pub struct TraceConfig {
    /// The optimizer step at the end of the graph.
    pub step: OptimizerStep,
    /// Learning rate of the traced step. The graph is also valid for other rates, if the optimizer uses the same
    /// operations for them; see [`StepScalars::structure`].
    pub learning_rate: f64,
    /// Types in which parameters compute. They must match the [`Options`](crate::passes::schedule::Options::precision)
    /// with which the graph is lowered. Those options, not this field, determine the types in which gradients are sent.
    pub precision: Precision,
    /// True to multiply the loss by a factor that the graph reads after the batch, as
    /// [`Options::scale_loss`](crate::passes::schedule::Options::scale_loss) requests.
    pub scales_loss: bool,
}

impl Default for TraceConfig {
    /// Returns the settings for a step after the first, at learning rate 0.001, in the module's types.
    fn default() -> Self {
        Self {
            step: OptimizerStep::Next,
            learning_rate: 1e-3,
            precision: Precision::default(),
            scales_loss: false,
        }
    }
}

/// Traces a whole train step: `loss` of the module that `init` creates, its gradients, and an optimizer step for every
/// parameter with a gradient. `optimizer` is one of Burn's, or [`OptimizerGroups`].
///
/// `init` is called with a device that computes nothing. Lazy parameters (all of Burn's) are never initialized. Only
/// the shapes and types of `batch` are used. Integers and booleans that the loss creates have the CPU's default types,
/// as in a compiled step. If an operation would mix tensors of two types, both closures are called a second time.
///
/// Parameters, buffers, inputs and states have the same ids in all graphs of the same model, regardless of the traced
/// step and batch.
///
/// # Errors
///
/// [`Error::Uncapturable`] if the loss reads the value of a tensor, or does something else that the capture device
/// rejects; [`Error::LossShape`] if it is not one number; [`Error::DuplicateName`] for tensors with the same name;
/// [`Error::NoGradient`]; [`Error::UntraceableOptimizer`]; [`Error::RandomInModule`]; [`Error::StatisticsTwice`].
pub fn trace<M, B, O>(
    init: impl Fn(&Device) -> M,
    loss: impl Fn(&M, B) -> Tensor<1>,
    optimizer: &O,
    batch: &B,
    config: TraceConfig,
) -> Result<Graph, Error>
where
    M: Module,
    B: Batch,
    O: Clone + Into<OptimizerGroups>,
{
    let joined = |_: &str, shape: &[usize]| shape.to_vec();
    let options = TraceOptions {
        defaults: Some(Defaults::of(&Device::flex())),
        precision: config.precision,
        scales_loss: config.scales_loss,
        ..TraceOptions::default()
    };
    trace_joined(init, loss, (batch, &joined), &options, |leaves| {
        let trained = leaves.iter().filter(|leaf| leaf.is_trained);
        let trained = trained.map(|leaf| Trained {
            id: leaf.id,
            path: leaf.path.clone(),
            shape: leaf.shape.clone(),
            dtype: leaf.dtype,
        });
        let optimizers: OptimizerGroups = optimizer.clone().into();
        optimizers.check_members(leaves.iter().map(|leaf| (leaf.id, &*leaf.path)))?;
        let mut scalars = HostScalars::new(optimizers, config.learning_rate, trained)?;
        let rates = config.learning_rate.into();
        let steps_before = match config.step {
            OptimizerStep::First => 0,
            OptimizerStep::Next => 2,
        };
        for _ in 0..steps_before {
            let step = scalars.peek(&rates)?;
            scalars.advance(&step, |_| true);
        }
        scalars.peek(&rates)
    })
    .map(|(graph, ())| graph)
}

/// Traces as [`trace`] does, with these options. `joined` returns the shapes to trace for the batch, and `optimizer`
/// returns the optimizer step for the module's tensors. Also returns the outputs other than the loss, with small
/// tensors as placeholders.
pub(crate) fn trace_joined<M, B, L>(
    init: impl Fn(&Device) -> M,
    loss: impl Fn(&M, B) -> L,
    batch: (&B, JoinedShape<'_>),
    options: &TraceOptions,
    optimizer: impl FnOnce(&[Leaf]) -> Result<StepScalars, Error>,
) -> Result<(Graph, L::Outputs), Error>
where
    M: Module,
    B: Batch,
    L: Loss,
{
    let recorded = |options: &TraceOptions| recorded(&init, &loss, batch, options);
    let (builder, template) = by_types(&init, options, recorded)?;
    let step = optimizer(&builder.leaves)?;
    Ok((builder.build(&step)?, template))
}

fn recorded<M, B, L>(
    init: impl FnOnce(&Device) -> M,
    loss: impl FnOnce(&M, B) -> L,
    (batch, joined): (&B, JoinedShape<'_>),
    options: &TraceOptions,
) -> Result<(Builder, L::Outputs), Error>
where
    M: Module,
    B: Batch,
    L: Loss,
{
    let mut specs = specs_of(batch)?;
    specs.extend(options.scales_loss.then(InputSpec::of_factor));
    let recording = record_with("the module", options.defaults, |device, progress| {
        let tracked = device.clone().autodiff();
        let stored = &options.stored;
        let model = with_fakes(init(&tracked), device, &tracked, stored);
        let (model, running) = with_running(model, &options.precision, device, &tracked, stored);
        let before = leaves(&model, None);
        let mut inputs = Vec::new();
        let fake = batch.clone().map(&mut batch::Fake {
            device: &tracked,
            path: batch::Path::default(),
            joined,
            found: |_, captured| inputs.push(captured),
        });
        // Recorded before the loss: all operations before the last given value count as the module's initialization.
        let factor = options.scales_loss.then(|| loss_factor(&tracked));
        inputs.extend(factor.as_ref().map(float_id));
        progress.enter("the loss");
        let computing = computing(model.clone(), &options.precision, &running);
        let begun = leaves(&computing, None);
        let naming = Naming::begin();
        let regions = Regions::begin();
        let (value, outputs) = match caught(|| loss(&computing, fake).into_parts()) {
            Ok(value) => value,
            Err(panic) => match running_twice(&computing, &begun) {
                Some(path) => return Err(Error::StatisticsTwice { path }),
                None => std::panic::resume_unwind(Box::new(panic.text())),
            },
        };
        let regions = regions.taken();
        naming.check(&options.activations)?;
        let activations = naming.asked(&options.activations);
        let shape = value.dims();
        if shape != [1] {
            return Err(Error::LossShape {
                shape: shape.to_vec(),
            });
        }
        let value = wide(value);
        let captured = float_id(&value);
        // The returned loss is not multiplied by the factor.
        let value = times(value, factor);
        let (template, outputs) = outputs::take(outputs);
        let (Some(loss), Ok(value)) = (captured, value.try_into_primitive::<Tape>()) else {
            return Err(Error::NoGradient);
        };
        progress.enter("the backward pass");
        let mut gradients = value.backward();
        let with_gradients = leaves(&model, Some(&mut gradients));
        progress.enter("the running statistics of the module");
        let (running, updates) = updates(computing, &tracked);
        let captures = Captures {
            before,
            with_gradients,
            running,
            updates,
            inputs,
            loss: Some(loss),
            outputs,
            activations,
            regions,
            is_narrow: options.is_narrow(),
        };
        Ok((captures, template))
    })?;
    let (recording, template) = recording.split();
    Ok((Builder::new(recording, specs)?, template))
}

/// Name of the loss factor among the inputs of a graph.
pub(crate) const LOSS_FACTOR: &str = "scale of the loss";

impl InputSpec {
    /// Returns the spec of the loss factor.
    fn of_factor() -> Self {
        Self {
            name: LOSS_FACTOR.to_owned(),
            shape: vec![1],
            dtype: DType::F32,
        }
    }
}

/// Returns the loss factor on the capture device.
fn loss_factor(device: &Device) -> Tensor<1> {
    let InputSpec { shape, dtype, .. } = InputSpec::of_factor();
    Tensor::empty(shape, (device, dtype))
}

/// Returns the loss times the factor, if there is one.
fn times(loss: Tensor<1>, factor: Option<Tensor<1>>) -> Tensor<1> {
    match factor {
        Some(factor) => factor.cast(loss.dtype()) * loss,
        None => loss,
    }
}

/// Returns the loss in at least 32 bits, like its mean over the ranks.
fn wide(loss: Tensor<1>) -> Tensor<1> {
    if is_half(loss.dtype()) {
        loss.cast(DType::F32)
    } else {
        loss
    }
}

/// Returns the path of a module whose running statistics were updated inside the loss. It ran a second time, and the
/// capture device rejects the way in which Burn then moves its statistics.
fn running_twice<M: Module>(model: &M, before: &[Leaf]) -> Option<String> {
    let now = leaves(model, None);
    let mut pairs = before.iter().zip(&now);
    let (leaf, _) = pairs.find(|(before, now)| before.captured != now.captured)?;
    let module = leaf.path.rsplit_once('.').map_or("", |(module, _)| module);
    Some(module.to_owned())
}
