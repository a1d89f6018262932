//! Compilation of closures into a step that runs.

mod agree;
mod begin;
mod cache;
mod evaluation;
mod idle;
mod inputs;
mod iterations;
mod loss_scale;
mod micro;
mod overrides;
mod pending;
mod repeat;
mod restored;
mod scaler;
mod state;
mod step;
mod ties;

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::Flex;
use burn::module::{Module, ParamId};
use burn::tensor::{Device, TensorData};
use burn_ir::BackendIr;
use parking_lot::Mutex;

use crate::error::Error;
use crate::initial::{InitialValues, ShardSpec};
use crate::kernels::has_kernels;
use crate::mode::Mode;
use crate::run::Executor;
use crate::trace::{
    Batch, Defaults, HostScalars, Loss, OptimizerGroups, ParameterSpec, StepScalars, Trained,
    parameters_with, trace_joined,
};

pub use evaluation::Evaluation;
pub use idle::{IdleState, IdleTensor};
pub use overrides::Override;
pub use state::OptimizerState;
pub use step::CompiledStep;

/// Compiles a train step: `loss` of a batch on the module that `init` creates, its gradients, and a step of `optimizer`
/// for every trained parameter. `loss` returns only the loss, or a pair of the loss and other tensors that the step
/// outputs; see [`Loss`]. All ranks of the mode's group must call it, with the same arguments.
///
/// The first batch of each set of shapes creates a graph. The initial values come from `init` on rank 0. No rank ever
/// holds more than its part and one whole parameter, as long as `init` leaves parameters lazy, as Burn's layers do.
/// [`LazyLora`](crate::LazyLora) does so for LoRA, unlike Burn's `apply_lora`. With
/// [`DataParallel::Automatic`](crate::DataParallel::Automatic), parts are flat shards until the first graph decides the
/// placements. To read values from a file, use [`compile_from`].
///
/// The optimizer is one of Burn's for all parameters, or [`OptimizerGroups`] with different optimizers for groups of
/// them. It also runs on the host at every step, and its host computations may depend on the learning rate, its step
/// number, its own state, and the shapes and types of parameters. As in Burn, it updates a parameter if the batch
/// produces a gradient for it. Gradient clipping is not part of Burn's `Optimizer`: `with_grad_clipping(..).build()`
/// drops it. A compiled step clips by the norm of all gradients if
/// [`Options::clip_grad_norm`](crate::passes::schedule::Options::clip_grad_norm) is set.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::{Mode, compile};
///
/// let mut step = compile(
///     |device: &Device| LinearConfig::new(3, 1).init(device),
///     |model: &Linear, (x, y): (Tensor<2>, Tensor<2>)| (model.forward(x) - y).square().mean(),
///     AdamWConfig::new().build(),
///     Mode::single(),
/// )?;
/// let device = Device::flex();
/// let batch = (Tensor::ones([8, 3], &device), Tensor::full([8, 1], 10.0, &device));
/// let first = step.step(1e-1, &batch)?;
/// for _ in 0..10 {
///     step.step(1e-1, &batch)?;
/// }
/// assert!(step.step(1e-1, &batch)? < first);
/// assert_eq!(step.parameter("weight")?.shape().to_vec(), [3, 1]);
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
///
/// # Frozen values
///
/// A graph holds the operations that the closures ran while it was traced, and nothing of the code between them.
/// Everything except the tensors of the model and the batch keeps the value that it had during the trace. This includes
/// numbers that the host draws or counts, branches, captured variables, and fields of a batch that are not tensors. If
/// a branch depends on a value with few possible values, name it with [`BatchMapper::fixed`]: each value gets its own
/// graph. Pass a value that changes from step to step (a temperature, a warm-up) as a tensor. Shapes may differ from
/// step to step.
///
/// When a graph is used for the second time, its step is traced again with the new batch and compared. If a counter,
/// random number or field has changed, the step returns [`Error::NotRepeatable`]. Later changes are not detected.
///
/// `init` and `loss` run on devices with autodiff. Tracing computes nothing on them, so neither closure may read the
/// value of a tensor. `init` runs once more on rank 0, for the initial values. A tensor of the model that is not a
/// parameter is part of the graph, and may not be random.
///
/// [`BatchMapper::fixed`]: crate::BatchMapper::fixed
///
/// # Errors
///
/// [`Error::Uncapturable`] if `init` reads the value of a tensor; [`Error::UntraceableOptimizer`] if the optimizer
/// rejects a parameter, or reads tensors; [`Error::UnknownName`] for a group or pattern that matches no parameter;
/// [`Error::Placement`], [`Error::Precision`], [`Error::LossScale`] or [`Error::Move`] for an unsupported mode;
/// [`Error::Tied`]; [`Error::ElementType`]; [`Error::Initialization`]; [`Error::Collective`].
pub fn compile<M, B, L, O>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&M, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
) -> Result<CompiledStep<B, Flex, L::Outputs>, Error>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
{
    compile_with(init, loss, optimizer, mode, ())
}

/// Compiles as [`compile`] does, with initial values that each rank reads for itself, such as its own shards from a
/// file.
///
/// `read` is called for each tensor of the module, in module order, once under each path that the tensor has. It
/// returns this rank's part in the requested shape, or `None` to use the value that `init` creates on rank 0. All ranks
/// must return parts of the same tensors. A lazy parameter whose value is read is not initialized.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fsdp_mesh::Region;
/// use burn_fsdp_spmd::{Error, Mode, compile_from};
///
/// let stored = [1f32, 2., 3.];
/// let mut step = compile_from(
///     |device: &Device| LinearConfig::new(3, 1).init(device),
///     |shard| match (&*shard.whole.path, &shard.region) {
///         ("weight", Region::Flat(range)) => {
///             let values = stored[range.clone()].to_vec();
///             Ok::<_, Error>(Some(TensorData::new(values, shard.shape.clone())))
///         }
///         _ => Ok(None),
///     },
///     |model: &Linear, x: Tensor<2>| model.forward(x).mean(),
///     SgdConfig::new().build(),
///     Mode::single(),
/// )?;
/// assert_eq!(step.parameter("weight")?, TensorData::from([[1f32], [2.], [3.]]));
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
///
/// The errors of `read`, [`Error::TensorMismatch`] for a part of a different shape or type, and the errors of
/// [`compile`].
pub fn compile_from<M, B, L, O, E>(
    init: impl Fn(&Device) -> M + Send + 'static,
    read: impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    loss: impl Fn(&M, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
) -> Result<CompiledStep<B, Flex, L::Outputs>, E>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    E: From<Error>,
{
    let on = (&Device::flex(), Default::default());
    compile_on::<Flex, M, B, L, O, (), E>((init, read), loss, optimizer, mode, (), on)
}

/// Compiles as [`compile`] does, with an [`Override`] that replaces parts that cannot be traced. `loss` receives the
/// module that replaces the one from `init`.
///
/// # Errors
///
/// Same as [`compile`]; [`Error::Override`].
pub fn compile_with<M, B, L, O, V>(
    init: impl Fn(&Device) -> M + Send + 'static,
    loss: impl Fn(&V::Traced, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
    over: V,
) -> Result<CompiledStep<B, Flex, L::Outputs>, Error>
where
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    V: Override<M> + 'static,
{
    let values = (init, |_: &ShardSpec<'_>| Ok::<_, Error>(None));
    let on = (&Device::flex(), Default::default());
    compile_on::<Flex, M, B, L, O, V, Error>(values, loss, optimizer, mode, over, on)
}

/// Compiles for any backend, with initial values as in [`compile_from`] and an override as in [`compile_with`] (`()`
/// for none). Parameters are initialized on `device`, with its default types, and steps run on `backend_device`.
///
/// Only Burn's CPU backend has kernels and a memory plan. Everything else is the same on all backends, so a step saved
/// on one can be resumed on another.
///
/// # Errors
///
/// As [`compile_from`] and [`compile_with`].
pub fn compile_on<Be, M, B, L, O, V, E>(
    (init, read): (
        impl Fn(&Device) -> M + Send + 'static,
        impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    ),
    loss: impl Fn(&V::Traced, B) -> L + Send + 'static,
    optimizer: O,
    mode: Mode,
    over: V,
    (device, backend_device): (&Device, Be::Device),
) -> Result<CompiledStep<B, Be, L::Outputs>, E>
where
    Be: BackendIr,
    M: Module + 'static,
    B: Batch,
    L: Loss,
    O: Into<OptimizerGroups>,
    V: Override<M> + 'static,
    E: From<Error>,
{
    let mut mode = if has_kernels::<Be>() {
        mode
    } else {
        mode.without_kernels()
    };
    let defaults = Some(Defaults::of(device));
    let options = mode.trace_options(defaults);
    let own = parameters_with(defaults, &init)?;
    let traced = parameters_with(defaults, |device| over.replace(init(device)))?;
    let added = overrides::added(&own, traced)?;
    let named = [own.as_slice(), added.as_slice()].concat();
    let specs: Vec<_> = named.iter().map(|(_, spec)| spec.clone()).collect();
    let parameters = specs.iter().filter(|spec| !spec.is_buffer);
    let shapes = parameters.clone();
    mode.assign_owners(shapes.map(|spec| (&spec.path, spec.shape.as_slice())))?;
    let parameters: Vec<_> = parameters
        .flat_map(|spec| ties::paths(spec).map(|path| (path, spec.dtype)))
        .collect();
    let paths: Vec<&str> = parameters.iter().map(|(path, _)| *path).collect();
    mode.check_full(&paths)?;
    mode.check_precision(&parameters)?;
    let optimizers = optimizer.into();
    ties::check(&named, &optimizers, &options.precision)?;
    let scalars = host_side(optimizers, named.iter().map(|(id, spec)| (*id, spec)))?;
    mode.keep_states(&specs, |path| scalars.format(path));
    let [own, added] = [own, added].map(|named| {
        let specs = named.into_iter().map(|(_, spec)| spec);
        specs.collect::<Vec<_>>()
    });
    let initial = initial_values((&init, read), &over, [&own, &added], &mode, device)?;
    let (initial, states) = with_pass_states(initial, &specs, &mode)?;
    let executor = Executor::new(backend_device, mode.ranks().group().clone());
    let executor = executor.axes(mode.ranks().axes()?);
    let templates = Arc::new(Mutex::new(Vec::new()));
    let kept = templates.clone();
    let paths: Vec<Arc<str>> = specs.iter().map(|spec| spec.path.clone()).collect();
    let tracer = move |batch: &B, step: &StepScalars, mode: &Mode| {
        let init = |device: &Device| over.replace(init(device));
        let loss = |model: &V::Traced, batch: B| loss(model, batch);
        let joined = |name: &str, shape: &[usize]| mode.joined_shape(name, shape);
        let traced = trace_joined(init, loss, (batch, &joined), &options, |_| Ok(step.clone()));
        let (mut graph, outputs) = traced?;
        graph.order_parameters(&paths);
        let mut kept = kept.lock();
        graph.set_template(kept.len());
        kept.push(outputs);
        drop(kept);
        over.rewrite(graph)
    };
    Ok(CompiledStep::new(
        (Box::new(tracer), templates),
        mode,
        specs.into_iter().chain(states).collect(),
        scalars,
        executor,
        initial,
    ))
}

/// Returns the initial values of a module's own tensors and of the tensors that an override adds.
fn initial_values<M: Module, V: Override<M>, E: From<Error>>(
    (init, read): (
        impl Fn(&Device) -> M,
        impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    ),
    over: &V,
    [own, added]: [&[ParameterSpec]; 2],
    mode: &Mode,
    device: &Device,
) -> Result<InitialValues, E> {
    let layout = |spec: &ParameterSpec| mode.initial_layout(spec);
    let (layout, ranks): (&dyn Fn(&ParameterSpec) -> _, _) = (&layout, mode.ranks());
    // An override's tensors may be created from the module's own values, so these are drawn once.
    let made = RefCell::new(None);
    let kept = |device: &Device| {
        let module = init(device);
        if !added.is_empty() {
            made.replace(Some(module.clone()));
        }
        module
    };
    let initial = InitialValues::new((kept, read), own, &layout, ranks, device)?;
    if added.is_empty() {
        return Ok(initial);
    }
    let replaced = |device: &Device| over.replace(made.take().unwrap_or_else(|| init(device)));
    let none = |_: &ShardSpec<'_>| Ok::<_, E>(None);
    let of_added = InitialValues::new((replaced, none), added, &layout, ranks, device)?;
    Ok(initial.and(of_added))
}

/// Adds the states of the user's passes to the initial values, and returns their specs. All ranks must call it.
fn with_pass_states(
    initial: InitialValues,
    own: &[ParameterSpec],
    mode: &Mode,
) -> Result<(InitialValues, Vec<ParameterSpec>), Error> {
    let specs = mode.pass_state_specs();
    overrides::check_pass_states(own, &specs)?;
    let values = mode.pass_states().into_iter().map(|state| state.initial);
    let values = specs.iter().cloned().zip(values);
    let states = InitialValues::of_rank_0(values, mode.ranks())?;
    Ok((initial.and(states), specs))
}

/// Creates the host side of the optimizers for a module's parameters, before the first step.
fn host_side<'a>(
    optimizers: OptimizerGroups,
    named: impl Iterator<Item = (ParamId, &'a ParameterSpec)> + Clone,
) -> Result<HostScalars, Error> {
    optimizers.check_members(named.clone().map(|(id, spec)| (id, &*spec.path)))?;
    let trained = named.filter(|(_, spec)| spec.is_trained);
    let trained = trained.map(|(id, spec)| Trained {
        id,
        path: spec.path.clone(),
        shape: spec.shape.clone(),
        dtype: spec.dtype,
    });
    // The rate is not zero, because optimizers may omit operations at rate zero.
    HostScalars::new(optimizers, 1.0, trained)
}
