//! The errors of a rank.

use std::path::PathBuf;

use burn_fsdp_data::DataError;
use burn_fsdp_models::ModelError;

use super::input::InputError;

/// An error that ends one rank.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RankError {
    #[error(transparent)]
    Engine(#[from] burn_fsdp::internals::sharding::Error),
    #[error(transparent)]
    Collective(#[from] burn_fsdp::internals::collectives::Error),
    #[error(transparent)]
    Mesh(#[from] burn_fsdp::internals::mesh::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] burn_fsdp::internals::checkpoint::CheckpointError),
    #[error(transparent)]
    Step(#[from] burn_fsdp::internals::checkpoint::Error),
    #[error(transparent)]
    Compiled(Box<burn_fsdp::internals::compile::Error>),
    #[error("training has already ended with an error")]
    Ended,
    #[error(transparent)]
    Input(#[from] Box<InputError>),
    /// An error in the files of a step that the user specified.
    #[error("cannot read {}: {source}", path.display())]
    Restore {
        path: PathBuf,
        source: Box<RankError>,
    },
    #[error(
        "{what} differs: {got} on rank {rank} (machine {host}), but {expected} on rank 0; start all processes \
         with the same program, arguments and data"
    )]
    Differs {
        what: String,
        rank: usize,
        host: String,
        got: String,
        expected: String,
    },
    #[error(
        "rank {rank} on machine {host} cannot use {}, where rank 0 saves: {problem}; pass a --checkpoint-dir on a \
         file system that all machines share",
        path.display()
    )]
    FolderNotShared {
        path: PathBuf,
        rank: usize,
        host: String,
        problem: String,
    },
    #[error(
        "--replicate-size host needs the same number of consecutive ranks on each machine, but the ranks are on \
         {hosts}; start them with `mpirun --map-by slot` and the same number of slots on each"
    )]
    Hosts { hosts: String },
    #[error("cannot pass on the result of a rank: {problem}")]
    Result { problem: String },
    #[error(
        "the model's outputs are not finite, so no token can be chosen; use another step or model"
    )]
    NoNumbers,
    #[error(
        "rank {rank} chose another token than rank 0: their processors round products differently, so they cannot \
         continue the same texts; use --weights sharded"
    )]
    OtherTokens { rank: usize },
}

impl RankError {
    /// Returns true if the cause is the user's input rather than the run.
    pub(crate) fn is_input(&self) -> bool {
        use burn_fsdp::internals::checkpoint::Error::{Foreign, NotAFolder};
        matches!(
            self,
            Self::Restore { .. }
                | Self::Input(_)
                | Self::Differs { .. }
                | Self::FolderNotShared { .. }
                | Self::Hosts { .. }
                | Self::Step(NotAFolder { .. } | Foreign { .. })
        )
    }
}

impl From<burn_fsdp::internals::compile::Error> for RankError {
    fn from(error: burn_fsdp::internals::compile::Error) -> Self {
        Self::Compiled(Box::new(error))
    }
}
