//! The errors of the eager engine.

use thiserror::Error as ThisError;

/// An error of the eager engine.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A pattern of the policy that matches nothing sharded.
    #[error(
        "pattern `{pattern}` matches no module with a parameter that is sharded, nor, where it may, such a parameter; the modules are: {modules}; \
         correct the pattern (`*` stands for any characters of one path segment, `**` for any segments)"
    )]
    UnmatchedPattern {
        /// The pattern as given.
        pattern: String,
        /// The module paths that exist, shortened.
        modules: String,
    },
    /// An axis that the mesh does not have.
    #[error(
        "the mesh has no axis `{axis}`, its axes are `{known}`; name the one to use with \
         `ShardPolicy::{method}`"
    )]
    Axis {
        /// The axis that the policy names.
        axis: String,
        /// The axes of the mesh.
        known: String,
        /// The method of the policy.
        method: &'static str,
    },
    /// Two parameters with the same path.
    #[error(
        "two parameters of the module have the path `{path}`; in a module written by hand, `visit` and \
         `map` must call `enter_module` and `exit_module` around each field, with names of their own"
    )]
    SamePath {
        /// The path.
        path: String,
    },
    /// A backward in which no parameter of the module takes part.
    #[error(
        "nothing of the module gets a gradient: it was built on a device without autodiff, or is all \
         frozen, or no trained parameter took part in the loss; build it on \
         `Device::flex().autodiff().gradient_checkpointing()`, leave a parameter unfrozen, and give \
         LoRA adapters to the policy (`ShardPolicy::lora`) in place of `apply_lora`, which freezes what is sharded"
    )]
    NoGraph,
    /// A parameter that no unit manages, and clones of it on ranks that are threads.
    #[error(
        "ranks {rank} and {peer} share parameter `{path}`, which is not sharded, and would wait for each \
         other's backward for ever: it was made once and cloned into the ranks; build the module on \
         each rank, shard or replicate all of it, or give each rank its own with `Module::fork`"
    )]
    SharedLeaf {
        /// Path of the parameter.
        path: String,
        /// This rank.
        rank: usize,
        /// The other one.
        peer: usize,
    },
    /// A parameter for which Burn would record a shard.
    #[error(
        "parameter `{path}` cannot be recorded: a mapper has rebuilt it without its own mappers, or a \
         group of ids left it out; in mappers use `Param::map` or `Param::from_mapped_value`, name \
         groups by path, or record by `full_state` or `snapshot`"
    )]
    Unrecordable {
        /// Path of the parameter.
        path: String,
    },
    /// A module without a float parameter left to shard.
    #[error(
        "nothing to shard: the module has no float parameter that is neither sharded already nor \
         ignored; call `fully_shard` once per module, children before parents, and ignore less"
    )]
    NothingToShard,
    /// A parameter that cannot be replaced.
    #[error(
        "parameter `{path}` of shape {shape:?} would be left unsharded: the module's `visit` shows \
         it, but its `map` does not reach it; in a module written by hand, both must go through the \
         same fields under the same names"
    )]
    Unreached {
        /// Path of the parameter.
        path: String,
        /// Shape of the whole parameter.
        shape: Vec<usize>,
    },
    /// A module whose parameters are all sharded or replicated already.
    #[error(
        "nothing to shard: every parameter belongs to a unit already, such as `{unit}`; \
         call `fully_shard` or `replicate` once per module, children before parents"
    )]
    AlreadySharded {
        /// One of the units.
        unit: String,
    },
    /// A pattern of ignored modules that names a sharded one.
    #[error(
        "parameter `{path}` is to be ignored, but is sharded already; \
         take its module out of the ignored ones, or do not shard it"
    )]
    IgnoredSharded {
        /// Path of the parameter.
        path: String,
    },
    /// A number of ranks to which full weights cannot be resharded.
    #[error(
        "cannot reshard to groups of {got} ranks: expected a divisor of the {ranks} ranks of the shard axis"
    )]
    ReshardTo {
        /// The given number of ranks in a group.
        got: usize,
        /// Ranks of the shard axis.
        ranks: usize,
    },
    /// A parameter that already carries a reparameterization of another kind.
    #[error(
        "parameter `{path}` already carries the reparameterization `{name}`; \
         Burn keeps only one per parameter, so sharding it would drop that one: \
         let sharding attach LoRA adapters (`ShardPolicy::lora`) and load a record of them afterwards, \
         or merge what is there with `Module::materialize`"
    )]
    Reparameterized {
        /// Path of the parameter.
        path: String,
        /// Name of the reparameterization that is there.
        name: String,
    },
    /// A parameter of two fields that cannot share it.
    #[error("parameters `{first}` and `{second}` are one parameter (same id), {problem}")]
    Tied {
        /// The path seen first.
        first: String,
        /// The path seen second.
        second: String,
        /// The reason why they cannot share it, and the remedy.
        problem: &'static str,
    },
    /// A backend for which this build has no gather operation.
    #[error(
        "parameter `{path}` lives on backend `{backend}`, for which no gather operation is \
         compiled in; {advice}"
    )]
    Backend {
        /// Path of the parameter.
        path: String,
        /// The backend found.
        backend: String,
        /// The cargo feature that adds it, or the list of those features.
        advice: String,
    },
    /// Parameters of one module on different backends.
    #[error(
        "parameter `{first}` is on {expected}, but `{second}` on {got}; build all on one backend, and use `ShardPolicy::offload_to` for the host"
    )]
    Backends {
        /// The path seen first.
        first: String,
        /// The first path on another backend.
        second: String,
        /// The device of the first.
        expected: String,
        /// The device of the second.
        got: String,
    },
    /// A parameter of an element type that cannot be reduced.
    #[error(
        "parameter `{path}` has element type {got}; sharded parameters are f32, f64, f16 or bf16: \
         cast it first, or quantize after training"
    )]
    ElementType {
        /// Path of the parameter.
        path: String,
        /// The element type found.
        got: String,
    },
    /// A layer of Burn's that does not compute in its parameters' type.
    #[error(
        "layer {layer} computes in {expected} alone, the type of its states, and its `{param}` in {got}: keep it in full by \
         `Precision::full_in`, and cast around it in the model, what goes in by `x.cast(DType::{expected})` and what comes \
         out by `x.cast(DType::{got})`, or build it in {expected} if the module is stored in {got}; or compile the step"
    )]
    LayerType {
        /// Path and name of the layer.
        layer: String,
        /// Path of the parameter.
        param: String,
        /// The type in which the layer computes.
        expected: String,
        /// The type in which the parameter computes.
        got: String,
    },
    /// Tensors of two types that met in one of Burn's operations.
    #[error(
        "tensors of two types met, after the model had read `{param}`, which computes in {dtype} ({reason}): cast what goes \
         into that layer by `x.cast(DType::{dtype})`, and what comes out by the type of what it meets"
    )]
    TwoTypes {
        /// Path of the sharded parameter that this rank read last.
        param: String,
        /// The type in which it computes.
        dtype: String,
        /// Burn's message.
        reason: String,
    },
    /// A tensor of a record that does not fit the parameter.
    #[error(
        "record of `{path}`: expected shape {expected:?}, got {got:?}; \
         load a record of the whole parameter in the module's own layout"
    )]
    RecordShape {
        /// Path of the parameter.
        path: String,
        /// Shape of the whole parameter.
        expected: Vec<usize>,
        /// Shape that the record holds.
        got: Vec<usize>,
    },
    /// Copies of the module with different values, which makes the intended one ambiguous.
    #[error(
        "unit `{unit}` has {copies} live copies with different values, and Burn does not tell \
         which of them is meant here; use `burn_fsdp::state::into_record(model)` in place of \
         `model.into_record()`, or drop the other copies first"
    )]
    AmbiguousCopy {
        /// The unit.
        unit: String,
        /// The number of copies that differ.
        copies: usize,
    },
    /// A unit that another rank uses, and for which this rank holds no copy of the same age.
    #[error(
        "rank {rank}: another rank uses unit `{unit}`, of which this rank holds several copies with \
         different values or none, and it is unclear which one the module in use goes with; keep the \
         parts of a module together, and clone or replace them on all ranks alike"
    )]
    NoCopy {
        /// This rank.
        rank: usize,
        /// The unit.
        unit: String,
    },
    /// A sharded module that two threads use at the same time.
    #[error(
        "rank {rank}: two threads use one sharded module at once, so the order of its operations is \
         left to chance; run the branches of a model one after the other on the rank's own thread \
         (no `rayon::join` or `spawn` around forwards)"
    )]
    Concurrent {
        /// This rank.
        rank: usize,
    },
    /// A loss whose graph was consumed already.
    #[error(
        "the graph of this loss was consumed by an earlier backward: two forwards of a module with \
         one unit, or that begin with different parameters, share the nodes of their parameters; \
         add the losses up and go backward once, or go backward before the next forward"
    )]
    Consumed,
    /// A child that was sharded over another process group than its parent.
    #[error(
        "unit `{unit}` is sharded over group `{got}`, its parent over `{expected}`; \
         shard a module and its children over one group"
    )]
    Group {
        /// The unit.
        unit: String,
        /// The parent's group.
        expected: String,
        /// The unit's group.
        got: String,
    },
    /// A unit in a state that does not allow the operation.
    #[error("unit `{unit}`: expected state {expected}, current state {got}; {advice}")]
    State {
        /// The unit.
        unit: String,
        /// The states allowed.
        expected: String,
        /// The state found.
        got: String,
        /// The advice to the user.
        advice: &'static str,
    },
    /// A tracked tensor in a recomputed region that is neither its input nor its module's.
    #[error(
        "a recomputed region captures a tensor with a graph, whose gradient would be lost; \
         pass it as the region's input, or detach it"
    )]
    Captured,
    /// A recomputed region whose second run computed a different result.
    #[error(
        "a recomputed region computed {second} where it had computed {first}; regions must be \
         deterministic: leave dropout and other random numbers outside, or let each rank be a process"
    )]
    Recomputed {
        /// An element of the first output.
        first: f32,
        /// The same element of the second.
        second: f32,
    },
    /// A wrong number of bytes read for a tensor.
    #[error("`{path}`: expected {expected} bytes for this rank's part, got {got}")]
    LocalLength {
        /// Path of the tensor.
        path: String,
        /// Bytes that this rank holds.
        expected: usize,
        /// Bytes read.
        got: usize,
    },
    /// A hook of the policy that returned a wrong result, or made a wrong request of the engine.
    #[error(
        "{of}: the policy's hook {got}, expected {expected}; give plain tensors of these lengths, made by `Tensor::inner` if \
         need be"
    )]
    Hook {
        /// The subject of the call: a parameter's path or a unit's name, with the rank.
        of: String,
        /// A description of the expected behavior.
        expected: String,
        /// A description of the hook's behavior.
        got: String,
    },
    /// A module without any sharded parameter, where a sharded one is needed.
    #[error("the module has no sharded parameter; call `fully_shard` first")]
    NotSharded,
    /// A module whose parameter names were changed by sharding.
    #[error(
        "parameter number {index} was `{expected}` before sharding and is `{got}` after it; \
         `visit` and `map` of a module written by hand must name the same parameters in the same \
         order"
    )]
    Names {
        /// Position in the order of the module.
        index: usize,
        /// Path before.
        expected: String,
        /// Path after.
        got: String,
    },
    /// An option with an invalid value.
    #[error("{option} is {got}; give it a value that is {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The value given.
        got: String,
    },
    /// A norm of all gradients that is infinite or not a number.
    #[error(
        "rank {rank}: the norm of all gradients is {norm} (on this rank the first such gradient is \
         {first}), so they cannot be clipped; skip the step, lower the learning rate or scale the \
         loss, or clip all the same with `NonFinite::Scale`"
    )]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
        /// This rank.
        rank: usize,
        /// The first parameter whose gradient on this rank is not finite.
        first: String,
    },
    /// A loss scale that has become too small to halve.
    #[error(
        "the loss scale has fallen to {scale:e} and every step still overflows: the loss or the \
         gradients are infinite or not a number by themselves; look for the cause in the model, its \
         data or the learning rate, or compute in bf16 or f32"
    )]
    LossScale {
        /// The last scale.
        scale: f64,
    },
    /// An optimizer that needs whole tensors.
    #[error(
        "the optimizer updates a shard of `{path}` otherwise than the same elements of the whole \
         parameter: it computes with whole tensors, as Muon, Adafactor, LAMB and Burn's gradient \
         clipping by norm do; give each of its parameters to one rank by \
         `ShardPolicy::one_owner([\"**\"])`, or use an element-wise one (SGD, Adam, AdamW, AdaGrad, \
         RMSProp, Lion, Adan), and `clip_grad_norm` to clip"
    )]
    WholeTensors {
        /// The first such parameter.
        path: String,
    },
    /// An optimizer that panicked on a shard before its trial showed whether it may work on shards.
    #[error(
        "the optimizer panicked at the shard of `{path}`, perhaps because it computes with whole tensors, as Muon does: \
         {panic}; `optim::check_elementwise(&model, &optimizer)` says so before training, and \
         `ShardPolicy::one_owner([\"**\"])` gives each parameter to one rank, whole"
    )]
    Untried {
        /// The parameter.
        path: String,
        /// The optimizer's message.
        panic: String,
    },
    /// A parameter that would be trained with each rank's own gradient.
    #[error(
        "parameter `{path}` is trained, but neither sharded nor ignored: each rank would go its own way \
         with it; shard it too (`fully_shard` or `replicate` its module, or the whole module when its \
         children are), or name it in `ShardPolicy::ignore` if each rank is to train its own"
    )]
    Unmanaged {
        /// Path of the parameter.
        path: String,
    },
    /// Optimizers with different settings on different ranks.
    #[error(
        "the optimizer of rank {rank} steps `{path}` otherwise than that of rank 0; configure the same optimizer on all \
         ranks, with the same groups"
    )]
    OptimizersDiffer {
        /// A rank whose optimizer differs from rank 0's.
        rank: usize,
        /// Path of the parameter.
        path: String,
    },
    /// A parameter or running state that differs between ranks but should not.
    #[error(
        "ranks {rank} and {peer} hold different values of `{path}`, which every rank should hold \
         alike; give both the same values before training: initialize with one seed or load one \
         record on all ranks, and call `sync_buffers` for running states"
    )]
    Disagreement {
        /// The first rank with its value.
        rank: usize,
        /// The first rank with another value.
        peer: usize,
        /// Path of the parameter or running state.
        path: String,
    },
    /// A closure that returned a different module from the one it was given.
    #[error(
        "the module returned has {got} at `{path}`, expected {expected}; return the module that the \
         closure was given, with changed values only"
    )]
    Returned {
        /// Path of the parameter.
        path: String,
        /// A description of the sharded module's tensor.
        expected: String,
        /// A description of the tensor that was returned.
        got: String,
    },
    /// A moving average that would be kept in 16 bits.
    #[error(
        "`{path}` is of type {dtype:?} and belongs to no unit, so that its average would be kept in 16 bits, where it never \
         moves; give the module this tensor in 32 bits"
    )]
    Average {
        /// Path of the tensor.
        path: String,
        /// Its type.
        dtype: burn::tensor::DType,
    },
    /// An optimizer state that could not be stored or read back.
    #[error("optimizer state of unit `{unit}`, file {file}: {reason}; {advice}")]
    OptimizerState {
        /// The unit.
        unit: String,
        /// The file.
        file: String,
        /// The reason of the failure.
        reason: String,
        /// The advice to the user.
        advice: &'static str,
    },
    /// A gradient that the engine has not summed and divided according to the policy.
    #[error(
        "rank {rank}: the audit of this step refuses the gradient of `{path}`, of unit `{unit}`: expected {expected}; got \
         {got}; {operations}; do not train on with it, and report this text as a fault of the engine"
    )]
    Audit {
        /// This rank.
        rank: usize,
        /// The unit.
        unit: String,
        /// Path of the parameter.
        path: String,
        /// The sum that was expected.
        expected: Box<str>,
        /// The actual sum.
        got: Box<str>,
        /// The collectives that carried the unit's gradients in this step, and the order of the step.
        operations: Box<str>,
    },
    /// An error of a collective.
    #[error(transparent)]
    Collective(#[from] burn_fsdp_collectives::Error),
    /// An impossible mesh or partition.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),
}
