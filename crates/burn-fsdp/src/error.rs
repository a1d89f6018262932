//! Why a training could not be saved or restored.

use burn::tensor::DType;
use burn_fsdp_checkpoint::Error as StepError;
use thiserror::Error as ThisError;

/// Why a training could not be saved or restored.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The step cannot be written or read, or does not fit the model.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The model cannot be read or filled.
    #[error(transparent)]
    Engine(#[from] burn_fsdp_shard::Error),
    /// The compiled step cannot be read or filled.
    #[error(transparent)]
    Compiled(Box<burn_fsdp_spmd::Error>),
    /// The state of the optimizer cannot be taken apart or put together.
    #[error("state of the optimizer: {reason}")]
    Optimizer {
        /// What is wrong.
        reason: String,
    },
    /// Another rank failed; this one has changed nothing on disk.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// A tensor is of a type that checkpoints do not hold.
    #[error("`{name}` is of type {dtype:?}; checkpoints hold floats, integers and booleans")]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
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

/// The state of the optimizer is not as it must be.
pub(crate) fn optimizer_error(reason: impl ToString) -> CheckpointError {
    CheckpointError::Optimizer {
        reason: reason.to_string(),
    }
}
