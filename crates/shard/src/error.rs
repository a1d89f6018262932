//! The errors of the eager engine.

use thiserror::Error as ThisError;

/// An error of the eager engine.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A pattern of the policy that matches no sharded parameter.
    #[error(
        "pattern `{pattern}` matches no module with a sharded parameter, nor such a parameter where it may name one; the \
         modules are: {modules}; correct the pattern (`*` matches any characters of one path segment, `**` any number of \
         segments)"
    )]
    UnmatchedPattern {
        /// The pattern as given.
        pattern: String,
        /// The existing module paths, in a shortened list.
        modules: String,
    },
    /// An axis that the mesh does not have.
    #[error(
        "the mesh has no axis `{axis}`, only `{known}`; name one of its axes with `ShardPolicy::{method}`"
    )]
    Axis {
        /// The axis that the policy names.
        axis: String,
        /// The axes that the mesh has.
        known: String,
        /// The method of the policy that sets the axis.
        method: &'static str,
    },
    /// Two parameters with the same path.
    #[error(
        "two parameters of the module have the path `{path}`; in a hand-written module, make `visit` and `map` call \
         `enter_module` and `exit_module` around each field, with a unique name"
    )]
    SamePath {
        /// The shared path.
        path: String,
    },
    /// A loss without a graph, or a module without a trained parameter.
    #[error(
        "no parameter of the module gets a gradient: it was built on a device without autodiff, is entirely frozen, or \
         no trained parameter took part in the loss; build it on `Device::flex().autodiff().gradient_checkpointing()`, \
         leave a parameter unfrozen, and attach LoRA adapters before sharding, or by the policy (`ShardPolicy::lora`): \
         `apply_lora` only freezes parameters that are already sharded"
    )]
    NoGraph,
    /// An unmanaged parameter that several ranks share, because ranks are threads and the module was cloned into them.
    #[error(
        "ranks {rank} and {peer} share parameter `{path}`, which is not sharded, and would wait forever for each other's \
         backward: it was created once and cloned into the ranks; build the module on each rank, shard or replicate all \
         of it, or give each rank its own copy with `Module::fork`"
    )]
    SharedLeaf {
        /// Path of the parameter.
        path: String,
        /// This rank.
        rank: usize,
        /// The other rank.
        peer: usize,
    },
    /// A parameter for which Burn would record a shard.
    #[error(
        "parameter `{path}` cannot be recorded: a mapper rebuilt it without its own mappers, or a group of ids left it \
         out; use `Param::map` or `Param::from_mapped_value` in mappers, name groups by path, or record with \
         `full_state` or `snapshot`"
    )]
    Unrecordable {
        /// Path of the parameter.
        path: String,
    },
    /// A module without a float parameter left to shard.
    #[error(
        "nothing to shard: the module has no float parameter that is neither sharded nor ignored; call `fully_shard` \
         once per module, children before parents, and ignore fewer parameters"
    )]
    NothingToShard,
    /// A parameter that cannot be replaced.
    #[error(
        "parameter `{path}` of shape {shape:?} would stay unsharded: the module's `visit` reaches it, but its `map` does \
         not; in a hand-written module, make both go through the same fields under the same names"
    )]
    Unreached {
        /// Path of the parameter.
        path: String,
        /// Full shape of the parameter.
        shape: Vec<usize>,
    },
    /// A module whose parameters are all sharded or replicated already.
    #[error(
        "nothing to shard: every parameter already belongs to a unit, such as `{unit}`; call `fully_shard` or \
         `replicate` once per module, children before parents"
    )]
    AlreadySharded {
        /// Name of one of the units that have these parameters.
        unit: String,
    },
    /// An ignore pattern that matches a sharded parameter.
    #[error(
        "parameter `{path}` should be ignored, but is already sharded; remove its module from the ignored ones, or do \
         not shard it"
    )]
    IgnoredSharded {
        /// Path of the parameter.
        path: String,
    },
    /// A group size to which full weights cannot be resharded after forward.
    #[error(
        "cannot reshard to groups of {got} ranks; choose a divisor of the {ranks} ranks of the shard axis"
    )]
    ReshardTo {
        /// The requested number of ranks per group.
        got: usize,
        /// Number of ranks on the shard axis.
        ranks: usize,
    },
    /// A parameter that already has another reparameterization.
    #[error(
        "parameter `{path}` already carries the reparameterization `{name}`, and sharding would drop it because Burn \
         keeps only one per parameter; merge it with `Module::materialize`, or attach an adapter with `apply_lora` to a \
         weight that is sharded: neither ignored, nor shared with an earlier field, nor quantized"
    )]
    Reparameterized {
        /// Path of the parameter.
        path: String,
        /// Name of the existing reparameterization.
        name: String,
    },
    /// Two fields that cannot share a parameter.
    #[error("parameters `{first}` and `{second}` are one parameter (same id), {problem}")]
    Tied {
        /// Path of the first field.
        first: String,
        /// Path of the field that cannot share its parameter.
        second: String,
        /// The reason that the fields cannot share the parameter, and the remedy.
        problem: &'static str,
    },
    /// A backend for which this build has no gather operation.
    #[error(
        "parameter `{path}` is on backend `{backend}`, for which this build has no gather operation; {advice}"
    )]
    Backend {
        /// Path of the parameter.
        path: String,
        /// Name of the backend.
        backend: String,
        /// The cargo feature that adds the backend, or a list of features that add backends.
        advice: String,
    },
    /// Parameters of one module on different backends.
    #[error(
        "parameter `{first}` is on {expected}, but `{second}` is on {got}; build the module on one backend, and use \
         `ShardPolicy::offload_to` to keep shards on the host"
    )]
    Backends {
        /// Path of the first parameter.
        first: String,
        /// Path of the first parameter on another backend.
        second: String,
        /// The device of the parameter `first`.
        expected: String,
        /// The device of the parameter `second`.
        got: String,
    },
    /// A parameter of an element type that cannot be reduced.
    #[error(
        "parameter `{path}` has element type {got}, but sharded parameters must be f32, f64, f16 or bf16; cast it first, \
         quantize after training, or let `ShardPolicy::base_in` quantize the base of adapters"
    )]
    ElementType {
        /// Path of the parameter.
        path: String,
        /// Element type of the parameter.
        got: String,
    },
    /// A Burn layer that does not compute in its parameters' type.
    #[error(
        "layer {layer} computes only in {expected}, the type of its states, but its `{param}` computes in {got}; keep it \
         in full precision with `Precision::full_in` or `ShardPolicy::stateful_layers_in_full` and, in the model, cast its input with `x.cast(DType::{expected})` \
         and its output with `x.cast(DType::{got})`; or build it in {expected} if the module is stored in {got}; or \
         compile the step"
    )]
    LayerType {
        /// Path and kind of the layer.
        layer: String,
        /// Path of the parameter.
        param: String,
        /// The type in which the layer computes.
        expected: String,
        /// The type in which the parameter computes.
        got: String,
    },
    /// Tensors of two types in one of Burn's operations.
    #[error(
        "tensors of two types met after the model read `{param}`, which computes in {dtype} ({reason}); cast the input \
         of that layer with `x.cast(DType::{dtype})`, and its output to the type of the tensors it meets"
    )]
    TwoTypes {
        /// Path of the sharded parameter that this rank read last.
        param: String,
        /// The type in which the parameter computes.
        dtype: String,
        /// Burn's message.
        reason: String,
    },
    /// A tensor of a record that does not fit the parameter.
    #[error(
        "record of `{path}`: expected shape {expected:?}, got {got:?}; load a record of the whole parameter in the \
         module's own layout"
    )]
    RecordShape {
        /// Path of the parameter.
        path: String,
        /// Shape of the whole parameter.
        expected: Vec<usize>,
        /// Shape in the record.
        got: Vec<usize>,
    },
    /// Copies of the module with different values, so the intended one is ambiguous.
    #[error(
        "unit `{unit}` has {copies} live copies with different values, and Burn does not tell which one is meant; use \
         `burn_fsdp::state::into_record(model)` instead of `model.into_record()`, or drop the other copies first"
    )]
    AmbiguousCopy {
        /// Name of the unit.
        unit: String,
        /// Number of copies with different values.
        copies: usize,
    },
    /// A unit that another rank uses, without a matching copy on this rank.
    #[error(
        "rank {rank}: another rank uses unit `{unit}`, but this rank holds no copy of it, or several with different \
         values, and cannot tell which one belongs to the module in use; keep the parts of a module together, and clone \
         or replace them in the same way on all ranks"
    )]
    NoCopy {
        /// This rank.
        rank: usize,
        /// Name of the unit.
        unit: String,
    },
    /// A sharded module used by two threads at the same time.
    #[error(
        "rank {rank}: two threads use one sharded module at the same time, so the order of its operations is left to \
         chance; run the branches of a model one after another on the rank's own thread (no `rayon::join` or `spawn` \
         around forwards)"
    )]
    Concurrent {
        /// This rank.
        rank: usize,
    },
    /// A loss whose graph has already been consumed.
    #[error(
        "an earlier backward consumed the graph of this loss: two forwards of a module share the nodes of their \
         parameters if it has one unit or they begin with different parameters; sum the losses and call backward once, \
         or call backward before the next forward"
    )]
    Consumed,
    /// A child that was sharded over a different process group than its parent.
    #[error(
        "unit `{unit}` is sharded over group `{got}`, but its parent over `{expected}`; shard a module and its children \
         over the same group"
    )]
    Group {
        /// Name of the unit.
        unit: String,
        /// The parent's group.
        expected: String,
        /// The unit's group.
        got: String,
    },
    /// A unit in a state that does not allow the operation.
    #[error("unit `{unit}` is {got}, but must be {expected}; {advice}")]
    State {
        /// Name of the unit.
        unit: String,
        /// The states in which the operation is allowed.
        expected: String,
        /// The current state.
        got: String,
        /// A remedy, shown to the user.
        advice: &'static str,
    },
    /// A recomputed region that captures a tensor with a graph, other than its input and its module's tensors.
    #[error(
        "a recomputed region captures a tensor with a graph, whose gradient would be lost; \
         pass it in the region's input, for example in a tuple, or detach it"
    )]
    Captured,
    /// A recomputed region whose second run differs from its first.
    #[error(
        "a recomputed region computed {second} where its first run computed {first}; make regions deterministic: keep \
         dropout and other random numbers outside, or run each rank as a process"
    )]
    Recomputed {
        /// An element of the first run's output, or the number of its float tensors and elements.
        first: String,
        /// The second run's counterpart of `first`.
        second: String,
    },
    /// A wrong number of bytes read for a tensor.
    #[error("`{path}`: expected {expected} bytes for this rank's part, got {got}")]
    LocalLength {
        /// Path of the tensor.
        path: String,
        /// Number of bytes that this rank holds.
        expected: usize,
        /// Number of bytes that were read.
        got: usize,
    },
    /// A policy hook that returned a wrong result, or made an invalid request to the engine.
    #[error(
        "{of}: the policy's hook {got}, expected {expected}; give plain tensors of these lengths, made with \
         `Tensor::inner` if necessary"
    )]
    Hook {
        /// The subject of the call: a parameter's gradient, or a unit's gather or reduction on a rank.
        of: String,
        /// The expected behavior.
        expected: String,
        /// The hook's actual behavior.
        got: String,
    },
    /// A module without any sharded parameter, where one is required.
    #[error("the module has no sharded parameter; call `fully_shard` first")]
    NotSharded,
    /// A module whose parameter names were changed by sharding.
    #[error(
        "parameter number {index} was `{expected}` before sharding and is `{got}` after it; in a hand-written module, \
         make `visit` and `map` name the same parameters in the same order"
    )]
    Names {
        /// Position of the parameter in module order.
        index: usize,
        /// Path before sharding.
        expected: String,
        /// Path after sharding.
        got: String,
    },
    /// An option with an invalid value.
    #[error("{option} is {got}, but must be {expected}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The invalid value.
        got: String,
    },
    /// A norm of all gradients that is infinite or not a number.
    #[error(
        "rank {rank}: the norm of all gradients is {norm} (first non-finite gradient on this rank: {first}), so they \
         cannot be clipped; skip the step, lower the learning rate, scale the loss, or clip anyway with \
         `NonFinite::Scale`"
    )]
    NonFiniteNorm {
        /// The computed norm.
        norm: f64,
        /// This rank.
        rank: usize,
        /// Path of the first parameter whose gradient on this rank is not finite.
        first: String,
    },
    /// A loss scale that has become too small to reduce further.
    #[error(
        "the loss scale has fallen to {scale:e} and every step still overflows, so the loss or the gradients are \
         infinite or NaN at any scale; look for the cause in the model, its data or the learning rate, or compute in \
         bf16 or f32"
    )]
    LossScale {
        /// The last scale.
        scale: f64,
    },
    /// An optimizer that needs whole tensors.
    #[error(
        "the optimizer updates a shard of `{path}` differently from the same elements of the whole parameter: it \
         computes with whole tensors, as Muon, Adafactor, LAMB and Burn's gradient clipping by norm do; give each of its \
         parameters to one rank with `ShardPolicy::one_owner([\"**\"])`, or use an element-wise optimizer (SGD, Adam, \
         AdamW, AdaGrad, RMSProp, Lion, Adan) and clip with `clip_grad_norm`"
    )]
    WholeTensors {
        /// Path of the first such parameter.
        path: String,
    },
    /// An optimizer that panicked on a shard before its trial was complete.
    #[error(
        "the optimizer panicked on the shard of `{path}`, perhaps because it computes with whole tensors, as Muon does: \
         {panic}; check it before training with `optim::check_elementwise(&model, &optimizer)`, or give each whole \
         parameter to one rank with `ShardPolicy::one_owner([\"**\"])`"
    )]
    Untried {
        /// Path of the parameter.
        path: String,
        /// The message of the panic.
        panic: String,
    },
    /// A parameter that each rank would train with its own gradient.
    #[error(
        "parameter `{path}` is trained but neither sharded nor ignored, so its values would diverge between ranks; shard \
         it (`fully_shard` or `replicate` its module, or the whole module if its children are sharded), or name it in \
         `ShardPolicy::ignore` to let each rank train its own"
    )]
    Unmanaged {
        /// Path of the parameter.
        path: String,
    },
    /// Optimizers with different settings on different ranks.
    #[error(
        "the optimizer of rank {rank} steps `{path}` differently from rank 0's; configure the same optimizer with the \
         same groups on all ranks"
    )]
    OptimizersDiffer {
        /// The rank whose optimizer differs from rank 0's.
        rank: usize,
        /// Path of the parameter.
        path: String,
    },
    /// A parameter or running state that differs between ranks but should not.
    #[error(
        "ranks {rank} and {peer} hold different values of `{path}`, which must be the same on every rank; give them the \
         same values before training: initialize with one seed or load one record on all ranks, and call `sync_buffers` \
         for running states"
    )]
    Disagreement {
        /// The first rank that holds one of the values.
        rank: usize,
        /// The first rank that holds a different value.
        peer: usize,
        /// Path of the parameter or running state.
        path: String,
    },
    /// A closure that did not return the module it received.
    #[error(
        "the returned module has {got} at `{path}`, expected {expected}; return the module that the closure received, \
         and change only its values"
    )]
    Returned {
        /// Path of the parameter.
        path: String,
        /// The sharded module's own tensor at this path.
        expected: String,
        /// The returned module's tensor.
        got: String,
    },
    /// A moving average that would be kept in 16 bits.
    #[error(
        "`{path}` has type {dtype:?} and belongs to no unit, so its average would be kept in 16 bits, where it never \
         moves; store this tensor in 32 bits, without `ShardPolicy::buffer_type`"
    )]
    Average {
        /// Path of the tensor.
        path: String,
        /// Element type of the tensor.
        dtype: burn::tensor::DType,
    },
    /// An optimizer state that could not be stored or read back.
    #[error("optimizer state of unit `{unit}`, file {file}: {reason}; {advice}")]
    OptimizerState {
        /// Name of the unit.
        unit: String,
        /// Path of the file.
        file: String,
        /// The reason for the failure.
        reason: String,
        /// A remedy, shown to the user.
        advice: &'static str,
    },
    /// A gradient that the engine did not sum and divide according to the policy.
    #[error(
        "rank {rank}: the audit of this step rejects the gradient of `{path}` in unit `{unit}`: expected {expected}; got \
         {got}; {operations}; stop training, and report this message as a bug in the engine"
    )]
    Audit {
        /// This rank.
        rank: usize,
        /// Name of the unit.
        unit: String,
        /// Path of the parameter.
        path: String,
        /// The sum that was expected.
        expected: Box<str>,
        /// The actual sum.
        got: Box<str>,
        /// The collectives that carried the unit's gradients in this step, and the step's order of operations.
        operations: Box<str>,
    },
    /// A shard or a gradient that cannot be kept in a file.
    #[error(transparent)]
    ShardFile(#[from] Box<crate::files::ShardFileError>),
    /// An error of a collective.
    #[error(transparent)]
    Collective(#[from] burn_fsdp_collectives::Error),
    /// An invalid mesh or partition.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),
}
