//! The library-wide error, and the error of saving and restoring.

use std::fmt;

use burn::tensor::DType;
use burn_fsdp_checkpoint::Error as StepError;
use burn_fsdp_collectives::LaunchError;
use thiserror::Error as ThisError;

use crate::device_name::DeviceNameError;

/// An error from any part of the library. A function that returns it, such as the body of a
/// [`launch`](burn_fsdp_collectives::launch()), can use `?` on the errors of sharding, steps, collectives, meshes, checkpoints,
/// compiled steps and launches.
///
/// The functions themselves return their own error types, which have more detail for a `match`. The message is also what
/// `{:?}` prints, because Rust prints the error of `main` that way.
#[derive(ThisError)]
#[non_exhaustive]
pub enum Error {
    /// An error of the eager engine: sharding, a step, or the state of a module.
    #[error(transparent)]
    Sharding(Box<burn_fsdp_shard::Error>),
    /// A collective operation that failed, here or on another rank.
    #[error(transparent)]
    Collective(Box<burn_fsdp_collectives::Error>),
    /// An invalid mesh, placement or partition.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),
    /// A training run that could not be saved or restored.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// A step that could not be compiled or run.
    #[error(transparent)]
    Compile(Box<burn_fsdp_spmd::Error>),
    /// An invalid device name, or a device that this build or this machine does not have.
    #[error(transparent)]
    Device(#[from] DeviceNameError),
    /// A call of a function for threads, such as `FullySharded::launch`, in one of several processes.
    #[error(
        "`{launcher}` started {processes} processes, but step outputs, from which Burn's loop computes metrics, \
         travel between processes only if they are `Portable`; call `FullySharded::{instead}`"
    )]
    TrainingAmongProcesses {
        /// The launcher that started the processes.
        launcher: String,
        /// The number of processes.
        processes: usize,
        /// The function for processes.
        instead: &'static str,
    },
    /// A process that has set up a different training run, in Burn's training loop.
    #[error(
        "rank {rank} differs from this rank in {what}; create the same loaders, model, optimizer and schedule in \
         every process, and read the same checkpoint"
    )]
    OtherTraining {
        /// The property that differs.
        what: &'static str,
        /// A rank where it differs.
        rank: usize,
    },
    /// A step's output that cannot be sent between processes.
    #[error("a step output does not match its `Portable` implementation: `{name}` {reason}")]
    Parcel {
        /// The tensor's name.
        name: String,
        /// Why it cannot be sent.
        reason: String,
    },
    /// A trained parameter that the policy ignores, in Burn's training loop.
    #[error(
        "`{path}` is trained but belongs to no unit: each rank would have its own copy, and Burn's loop saves and \
         returns only one; remove it from `ShardPolicy::ignore`, or freeze it"
    )]
    IgnoredInTraining {
        /// The parameter's path.
        path: String,
    },
    /// Adapters that sharding would attach, in Burn's training loop.
    #[error(
        "the policy attaches LoRA adapters, but Burn's loop saves and resumes the model that you pass, which does not \
         have them; call Burn's `apply_lora` on the model instead, or write your own loop: `launch`, `fully_shard`, \
         `backward`, `step`"
    )]
    AdaptersInTraining,
    /// A mesh axis that the policy names, in Burn's training loop.
    #[error(
        "the policy names the mesh axis `{axis}`, but Burn's loop makes the mesh itself; omit axes from the policy, and \
         call `.replicas(n)` on `FullySharded` for n replicas"
    )]
    AxisInTraining {
        /// The axis.
        axis: String,
    },
    /// Ranks that do not divide into replicas, in Burn's training loop.
    #[error(
        "`FullySharded::replicas({replicas})` does not divide the {ranks} ranks; pass a divisor of the number of ranks"
    )]
    Replicas {
        /// The number of replicas.
        replicas: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A panic of Burn's training loop before the ranks started, for example because a checkpoint does not load.
    #[error(
        "Burn's loop stopped before the first step: {reason}; if a checkpoint does not load, resume with the model that \
         it was saved from, from a folder that has it. Burn cannot load a weight in columns (`LinearLayout::Col`) that \
         `apply_lora` has adapted: its recorded shape is transposed. Use `LinearLayout::Row` for such layers, or your \
         own loop with `resume`"
    )]
    NotStarted {
        /// The message of the panic. It names the parameters that do not load.
        reason: String,
    },
    /// A step that does not scale its loss, in a training run with a loss scaler.
    #[error(
        "the training run scales losses, but a step computed its backward without the scale; in `TrainStep::step`, call \
         `FullySharded::scale_loss(loss).backward()`, or omit `FullySharded::loss_scaler`"
    )]
    UnscaledLoss,
    /// Items that do not divide evenly, in a compiled training run of Burn's loop.
    #[error(
        "the {of} has {items} items, which do not divide evenly among {ranks} ranks: compiled steps need batches of the \
         same shapes on all ranks; leave out the last items, for example with Burn's `PartialDataset`, or train with \
         `FullySharded::launch`"
    )]
    UnevenItems {
        /// The training or the validation.
        of: &'static str,
        /// The number of items.
        items: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// Batches with different numbers of items, in a compiled training run of Burn's loop.
    #[error(
        "the ranks' batches have different numbers of items: compiled steps need batches of the same shapes on all \
         ranks; use a batch strategy that returns the same numbers everywhere, a loader with at most one worker \
         (several return a smaller last batch at any time), or `FullySharded::launch`"
    )]
    UnevenBatches,
    /// A setting that a compiled training run of Burn's loop does not have.
    #[error("`FullySharded::{setting}` has no effect in compiled steps; {instead}")]
    EagerSetting {
        /// The setting.
        setting: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// A model without autodiff, in Burn's training loop.
    #[error(
        "the model is on a device without autodiff and cannot be trained; build it on one such as \
         `Device::flex().autodiff().gradient_checkpointing()`, or call `train()` on a model that was returned for \
         inference"
    )]
    UntrackedInTraining,
    /// A failed operation on a temporary file for a checkpoint of Burn's training loop.
    #[error(
        "cannot {operation} {}: {source}; with `FullySharded::scratch`, set another folder for temporary files as \
         large as the model and its optimizer state", path.display()
    )]
    Scratch {
        /// The failed operation.
        operation: &'static str,
        /// The file or folder.
        path: std::path::PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A data loader that failed.
    #[error("a loader of batches: {0}")]
    Loader(String),
    /// A launch in which a rank failed or could not be started.
    #[error(transparent)]
    Launch(Box<LaunchError>),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<burn_fsdp_shard::Error> for Error {
    fn from(error: burn_fsdp_shard::Error) -> Self {
        Self::Sharding(Box::new(error))
    }
}

impl From<burn_fsdp_collectives::Error> for Error {
    fn from(error: burn_fsdp_collectives::Error) -> Self {
        Self::Collective(Box::new(error))
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<StepError> for Error {
    fn from(error: StepError) -> Self {
        CheckpointError::from(error).into()
    }
}

impl From<burn_fsdp_spmd::Error> for Error {
    fn from(error: burn_fsdp_spmd::Error) -> Self {
        Self::Compile(Box::new(error))
    }
}

impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        Self::Launch(Box::new(error))
    }
}

/// The error of saving or restoring a training run.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A step that cannot be written or read, or that does not fit the model.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A model whose state cannot be read or replaced.
    #[error(transparent)]
    Engine(#[from] burn_fsdp_shard::Error),
    /// A compiled step whose state cannot be read or replaced.
    #[error(transparent)]
    Compiled(Box<burn_fsdp_spmd::Error>),
    /// An optimizer state that cannot be split or reassembled.
    #[error("optimizer state: {reason}")]
    Optimizer {
        /// The reason.
        reason: String,
    },
    /// A Burn record of a model that cannot be written.
    #[error("model record: {reason}")]
    Record {
        /// The reason.
        reason: String,
    },
    /// A failure of another rank; this rank has changed nothing on disk.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// The failed rank.
        rank: usize,
        /// The error message of that rank.
        reason: String,
    },
    /// A mesh other than the one over which the model is sharded.
    #[error(
        "`{path}` is sharded over {ranks} ranks, but the axis `{axis}` of the given mesh has {got}; pass the mesh that \
         `fully_shard` or the mode of the compiled step was given"
    )]
    OtherMesh {
        /// The parameter's path.
        path: String,
        /// The number of ranks among which the parameter is divided.
        ranks: usize,
        /// The axis of the shards.
        axis: String,
        /// The number of ranks along the axis.
        got: usize,
    },
    /// A factor of an adapter that was trained with another scale.
    #[error(
        "`{path}` was trained with a scale (alpha over rank) of {saved}, but the model's adapter has a scale of {got}, \
         which changes the model; give the call that attaches the adapters, `apply_lora` or `ShardPolicy::lora`, the \
         alpha of the training"
    )]
    AdapterScale {
        /// The factor's path.
        path: String,
        /// The scale in the step.
        saved: f64,
        /// The scale in the model.
        got: f64,
    },
    /// A step with different values under two paths of a parameter that several fields share.
    #[error(
        "the step has different values for `{first}` and `{second}`, which are one parameter of the model; restore \
         into a model with two parameters, or save a step in which they are equal"
    )]
    Tied {
        /// The path that is read.
        first: String,
        /// The other path.
        second: String,
    },
    /// An optimizer's state whose type would change when it is restored.
    #[error(
        "the optimizer keeps `{field}` of `{path}` in {dtype:?}, but Burn loads it as {back:?}, with which no step \
         is possible: the training could not be resumed; build the model in {back:?} and let \
         `ShardPolicy::precision` compute in {dtype:?}, or make {dtype:?} the default of the device with \
         `Device::configure` before the first tensor"
    )]
    StateType {
        /// The parameter's path.
        path: String,
        /// The field of the state.
        field: String,
        /// The type of the tensor in that field.
        dtype: DType,
        /// The type that it would have after restoring.
        back: DType,
    },
    /// A tensor whose type checkpoints do not support.
    #[error("`{name}` is of type {dtype:?}; checkpoints hold floats, integers and booleans")]
    Type {
        /// The tensor's name.
        name: String,
        /// The type of the tensor.
        dtype: DType,
    },
}

impl From<burn_fsdp_spmd::Error> for CheckpointError {
    fn from(error: burn_fsdp_spmd::Error) -> Self {
        Self::Compiled(Box::new(error))
    }
}

impl From<burn_fsdp_collectives::Error> for CheckpointError {
    fn from(error: burn_fsdp_collectives::Error) -> Self {
        Self::Engine(error.into())
    }
}

impl From<burn_fsdp_mesh::Error> for CheckpointError {
    fn from(error: burn_fsdp_mesh::Error) -> Self {
        Self::Engine(error.into())
    }
}

/// Returns the error for an invalid state of the optimizer.
pub fn optimizer_error(reason: impl ToString) -> CheckpointError {
    CheckpointError::Optimizer {
        reason: reason.to_string(),
    }
}
