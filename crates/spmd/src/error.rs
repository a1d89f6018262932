//! Errors of tracing, transforming and running a step.

mod constructors;
mod dump;
mod moves;
mod option;
mod overrides;
mod proof;
mod scale;
mod text;

use std::sync::Arc;

use burn::tensor::DType;

use crate::pass_id::PassId;
pub use dump::DumpError;
pub use moves::MoveError;
pub use option::OptionError;
pub use overrides::OverrideError;
pub use proof::ProofError;
pub use scale::ScaleError;
use text::{After, At, Known, Pass, Produced, advice};

/// The reason why a step could not be traced, transformed or run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model or loss that cannot be represented as a graph, for example because it reads a tensor's value on the
    /// host.
    #[error(
        "cannot capture {stage}: {reason}{}; {}",
        Produced(produced_by),
        advice(reason, produced_by.as_deref())
    )]
    Uncapturable {
        /// The part that was being traced: the module, the loss or the optimizer.
        stage: &'static str,
        /// The operation whose result was requested, if it is known.
        produced_by: Option<String>,
        /// Burn's message.
        reason: String,
    },

    /// Parameters with the same id that cannot be one parameter.
    #[error("parameters `{first}` and `{second}` are one parameter (same id), {problem}")]
    Tied {
        /// Path of the first parameter.
        first: String,
        /// Path of the second parameter.
        second: String,
        /// The reason, and how to fix it.
        problem: &'static str,
    },

    /// A panic in `init` while it computed the initial values.
    #[error(
        "init failed on rank 0 while it computed the initial values: {reason}; make the module on the device that `init` \
         receives, which has autodiff"
    )]
    Initialization {
        /// Message of the panic.
        reason: String,
    },

    /// A tensor of the module that is drawn at random, but is not a parameter.
    #[error(
        "the loss reads a tensor that `init` draws at random ({operation} of shape {shape:?}) and that is not a \
         parameter, so every step would draw it again; make it a frozen parameter \
         (Param::from_tensor(tensor).set_require_grad(false)), which is drawn once and saved"
    )]
    RandomInModule {
        /// The operation that draws it.
        operation: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },

    /// A module with running statistics that runs twice in one loss.
    #[error(
        "\"{path}\" runs twice in one loss, but its running statistics (BatchNorm) can be captured only once; run it \
         once on the concatenated rows (Tensor::cat), or train this model with the eager engine (fully_shard)"
    )]
    StatisticsTwice {
        /// Path of the module.
        path: String,
    },

    /// A step whose second trace differs from the first.
    #[error(
        "the step differs each time it is traced: {difference}; a compiled step only repeats what was traced, so pass \
         values that the host draws or counts (random numbers, step counters, scheduled weights, the order of a HashMap) \
         as tensors of the batch, or name them with BatchMapper::fixed"
    )]
    NotRepeatable {
        /// The first operation that differs, and how.
        difference: String,
    },

    /// Another rank could not prepare the step.
    #[error(
        "rank {rank} could not prepare the step, so no rank ran it; see the error of that rank. Nothing has changed: \
         continue with another batch, or stop"
    )]
    PeerNotReady {
        /// The first rank that failed.
        rank: usize,
    },

    /// An operation of the model that is not one of Burn's, and for which the step has no
    /// [`CustomOperation`](crate::CustomOperation).
    #[error(
        "the model uses the operation \"{name}\", which is not one of Burn's; pass the step a CustomOperation of that \
         name (CompiledStep::operations)"
    )]
    UnknownOperation {
        /// Name of the operation.
        name: String,
    },

    /// A loss that is not one number.
    #[error(
        "the loss has shape {shape:?}; reduce it to one element, for example with mean(), and where the ranks' inputs \
         are joined (DataParallel::Automatic) name the inputs without a batch dim (Mode::shared_input)"
    )]
    LossShape {
        /// Shape of the loss.
        shape: Vec<usize>,
    },

    /// A step in which no parameter gets a gradient.
    #[error(
        "the loss depends on no parameter that requires a gradient; use the model in the loss, and \
         leave at least one parameter unfrozen"
    )]
    NoGradient,

    /// Two tensors of a batch, or two parameters, with the same name.
    #[error("{what} \"{name}\" occurs twice; give each a unique name")]
    DuplicateName {
        /// Kind of the named object, such as an input or a parameter.
        what: &'static str,
        /// The name.
        name: String,
    },

    /// A name that matches nothing.
    #[error("there is no {what} \"{name}\"; {}", Known(known))]
    UnknownName {
        /// Kind of the named object, such as an input or a parameter.
        what: &'static str,
        /// The name.
        name: String,
        /// The first known names.
        known: String,
    },

    /// A tensor that cannot be placed on the mesh as requested.
    #[error(
        "{what} \"{name}\" of shape {shape:?} cannot be {placement}: {reason}; choose \
         another placement, or replicate it"
    )]
    Placement {
        /// Kind of the tensor, such as a parameter or an input.
        what: &'static str,
        /// Path or name of the tensor.
        name: String,
        /// The requested placement, and the mesh axis.
        placement: String,
        /// Shape of the whole tensor.
        shape: Vec<usize>,
        /// The reason.
        reason: String,
    },

    /// An operation that cannot run on operands with these placements.
    #[error(
        "{operation} cannot run on axis {axis} with operands {operands}; int and bool tensors cannot be summed over \
         ranks, so place the tensors that they are computed from to make them whole where necessary"
    )]
    NoRule {
        /// The operation.
        operation: String,
        /// The mesh axis.
        axis: String,
        /// Types, shapes and placements of the operands.
        operands: String,
    },

    /// A value that must be redistributed, but whose type collectives do not support.
    #[error(
        "{value} of type {dtype:?} cannot be redistributed on axis {axis}, because only float tensors are summed over \
         ranks; replicate the tensors that it is computed from"
    )]
    Redistribution {
        /// The value.
        value: String,
        /// Type of the value's elements.
        dtype: DType,
        /// The mesh axis.
        axis: String,
    },

    /// Random numbers that must be the same on all ranks of an axis, but cannot be.
    #[error(
        "{operation} of shape {shape:?} cannot be the same on all ranks of axis {axis}, because each rank draws a part \
         and no dim can be cut into equal parts; in a train step, draw from a seed (Mode::seeded), or turn off dropout"
    )]
    RandomReplicated {
        /// The operation.
        operation: String,
        /// Shape of the whole tensor.
        shape: Vec<usize>,
        /// The mesh axis.
        axis: String,
    },

    /// A tensor whose shape or type differs from the traced one.
    #[error(
        "{what} \"{name}\" is {got}, but the graph has {expected}; pass a tensor of that shape and type, or compile for \
         this one"
    )]
    TensorMismatch {
        /// Kind of the named object, such as an input, a parameter or a state.
        what: &'static str,
        /// The name.
        name: String,
        /// Type and shape in the graph.
        expected: String,
        /// Type and shape of the tensor that was passed.
        got: String,
    },

    /// An optimizer that cannot run on shards, because it combines elements of a parameter.
    #[error(
        "the optimizer combines elements of parameter \"{path}\" ({operation}), so it cannot run on a shard of it; in \
         data parallelism, give the parameter to one rank (Mode::one_owner) or use Strategy::NoShard; elsewhere, use an \
         optimizer such as AdamW"
    )]
    OptimizerNotElementwise {
        /// Path of the parameter.
        path: String,
        /// The operation that combines elements.
        operation: String,
    },

    /// A tensor that the loss closure returns in addition to the loss, but that a step cannot output.
    #[error(
        "the loss closure returns \"{name}\" in addition to the loss, but a step cannot output it: {reason}; return \
         tensors computed from the model and the batch, on their device"
    )]
    Output {
        /// Name of the tensor.
        name: String,
        /// The reason.
        reason: &'static str,
    },

    /// Hybrid sharding on a mesh or with a strategy that does not support it.
    #[error(
        "hybrid sharding needs a mesh of two axes and a strategy with shards, not {axes} and {strategy}; pass a mesh \
         such as [(\"replicate\", 2), (\"shard\", 4)] and Strategy::FullShard, or use Mode::data_parallel"
    )]
    Hybrid {
        /// The strategy.
        strategy: burn_fsdp_mesh::Strategy,
        /// Number of axes of the mesh.
        axes: usize,
    },

    /// Mixed precision that a compiled step does not support.
    #[error("compiled steps do not support mixed precision {what}; {way_out}")]
    Precision {
        /// The requested feature.
        what: &'static str,
        /// An alternative.
        way_out: &'static str,
    },

    /// An evaluation that cannot run on the parameters of a step.
    #[error("an evaluation cannot run on the parameters of this step: {reason}")]
    Evaluation {
        /// The reason, with advice.
        reason: String,
    },

    /// A step over an empty list of micro-batches.
    #[error("a step needs at least one micro-batch; call it with the batches of the step")]
    NoBatch,

    /// Micro-batches of one step that produce gradients for different parameters.
    #[error(
        "some micro-batches of a step give parameter \"{path}\" a gradient, but others give none, or one that it shares \
         with another parameter; give micro-batches equal shapes and use the parameter in each, multiplied by zero where \
         it does not count, or train this model with the eager engine (fully_shard)"
    )]
    MicroBatches {
        /// The first parameter that differs.
        path: String,
    },

    /// An option that does not fit the step.
    #[error(transparent)]
    Option(#[from] OptionError),

    /// An optimizer whose step or state cannot be traced.
    #[error(
        "the optimizer {optimizer} cannot be traced for parameter \"{path}\": {reason}; use another optimizer, or train \
         this model with the eager engine (fully_shard)"
    )]
    UntraceableOptimizer {
        /// Type of the optimizer.
        optimizer: &'static str,
        /// Path of the parameter.
        path: String,
        /// The reason: the part of the step or state that cannot be traced.
        reason: String,
    },

    /// An override whose module cannot replace the step's module.
    #[error(transparent)]
    Override(#[from] OverrideError),

    /// A value that must be set when a step begins, but is not.
    #[error("{what} has no value; set it before the step")]
    Missing {
        /// Description of the value.
        what: String,
    },

    /// A pass that was applied twice.
    #[error("pass {pass} has already been applied to this graph; apply it once")]
    PassTwice {
        /// The pass.
        pass: PassId,
    },

    /// A pass that runs before one that it builds on, or after one that it must precede.
    #[error("pass {pass} must come {relation} pass {other}; reorder the passes")]
    PassOrder {
        /// The pass.
        pass: PassId,
        /// `after` or `before`.
        relation: &'static str,
        /// The other pass.
        other: PassId,
    },

    /// A graph that breaks a rule of the verifier.
    #[error(
        "the graph{} breaks the rule \"{rule}\" at node {node} ({operation}): {reason}; this is a bug in the last pass",
        After(after)
    )]
    InvalidGraph {
        /// Name of the rule.
        rule: &'static str,
        /// The pass that produced the graph, if any.
        after: Option<PassId>,
        /// Index of the node at fault.
        node: usize,
        /// Description of the node.
        operation: String,
        /// Description of the fault.
        reason: String,
    },

    /// A plan that does not compute the traced step, detected by its proof.
    #[error(
        "the plan does not compute the traced step: after the pass \"{}\", {reason}, on rank {rank}{}; turn the pass off \
         where an option allows it, and report this",
        Pass(*pass),
        At(*node, operation.as_str())
    )]
    NotCertified {
        /// The first pass after which the step computes something else; `None` if the trace itself is invalid.
        pass: Option<PassId>,
        /// Index of the first node that is known to compute something else, if any.
        node: Option<usize>,
        /// Description of that node.
        operation: String,
        /// The first rank that differs.
        rank: usize,
        /// Description of the difference.
        reason: String,
    },

    /// A plan that cannot be proved correct or incorrect, see [`Mode::certified`](crate::Mode::certified).
    #[error(
        "a plan {what} cannot be proved; prove the step in data parallelism, or skip the proof"
    )]
    NotProvable {
        /// The part that proofs do not support.
        what: String,
    },

    /// A process group with a different number of ranks than the graph.
    #[error(
        "the graph was made for {expected} ranks, but the group has {got}; compile it for {got}"
    )]
    GroupSize {
        /// Number of ranks that the graph was created for.
        expected: usize,
        /// Number of ranks in the group.
        got: usize,
    },

    /// An attempt to resume at a step before the current one.
    #[error(
        "{done} steps are done, so a run cannot be resumed after {steps}; restore it from a checkpoint (resume_with)"
    )]
    Backwards {
        /// Number of steps done.
        done: u64,
        /// Number of steps at which the run should resume.
        steps: u64,
    },

    /// Ranks that do not run the same graph.
    #[error(
        "rank {rank} would run a different graph from rank 0, so no rank ran one: {difference}; give all ranks the same \
         model, optimizer, learning rate, mode and batch shapes. Nothing has changed, and the next step may follow"
    )]
    GraphsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The batches of both ranks, or another difference.
        difference: String,
    },

    /// An operation that failed during the step.
    #[error("node {node} ({operation}) failed: {reason}")]
    Execution {
        /// Index of the node in the schedule.
        node: usize,
        /// Name of the node's operation.
        operation: String,
        /// The backend's message.
        reason: String,
    },

    /// A step that cannot run, because an earlier one failed halfway.
    #[error(
        "an earlier step failed ({reason}) and left parameters and optimizer states from different steps; compile again \
         and start from a checkpoint"
    )]
    Poisoned {
        /// Error of the step that failed.
        reason: String,
    },

    /// A collective operation that failed.
    #[error("at node {node}: {source}")]
    Collective {
        /// Index of the node in the schedule; 0 for a collective outside of it.
        node: usize,
        /// The error of the collective.
        source: Arc<burn_fsdp_collectives::Error>,
    },

    /// An element type that the ranks cannot exchange.
    #[error(
        "parameter \"{path}\" has element type {dtype:?}, which collectives cannot move; use a float type"
    )]
    ElementType {
        /// Path of the parameter.
        path: String,
        /// Element type of the parameter.
        dtype: DType,
    },

    /// An invalid mesh or layout.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),

    /// A loss that cannot be scaled.
    #[error(transparent)]
    LossScale(#[from] ScaleError),

    /// A plan that was not proved.
    #[error(transparent)]
    Proof(#[from] ProofError),

    /// Nodes that cannot be moved into the next step.
    #[error(transparent)]
    Move(#[from] MoveError),

    /// A dump of graphs that could not be written.
    #[error(transparent)]
    Dump(#[from] DumpError),

    /// A broken assumption: a bug in this crate or in Burn.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}
