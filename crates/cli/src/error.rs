//! The errors of the commands, and their exit codes.

mod input;
mod prompt;
mod rank;

use std::process::ExitCode;

use burn_fsdp::internals::collectives::{LaunchError, processes};
pub(crate) use input::InputError;
pub(crate) use prompt::PromptError;
pub(crate) use rank::RankError;

/// The failure of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error in the user's input.
    #[error(transparent)]
    Input(Box<InputError>),
    /// The failure of a rank, which the message names.
    #[error(transparent)]
    Rank(Box<LaunchError>),
    /// An error in the user's input that a rank found. Any rank may find it first, so the message does not name the
    /// rank.
    #[error("{0}")]
    Read(Box<RankError>),
    /// An error in the user's input that all processes of a run agreed on.
    #[error("{0}")]
    Agreed(String),
    /// The problems of a run in which all ranks finished.
    #[error("{0}")]
    Unfinished(String),
    /// An error while printing the command's result.
    #[error("cannot write to stdout: {0}")]
    Stdout(std::io::Error),
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Failed {
                rank,
                source,
                abandoned,
            } => match source.downcast::<RankError>() {
                Ok(source) if source.is_input() => Self::Read(source),
                other => Self::Rank(Box::new(LaunchError::Failed {
                    rank,
                    source: match other {
                        Ok(source) => source,
                        Err(source) => source,
                    },
                    abandoned,
                })),
            },
            // Errors in the command line and the environment, before any rank starts.
            error @ (LaunchError::Environment { .. }
            | LaunchError::OtherLauncher { .. }
            | LaunchError::TooManyRanks { .. }
            | LaunchError::TooManyThreads { .. }
            | LaunchError::NoMpi { .. }) => InputError::Launch(Box::new(error)).into(),
            error => Self::Rank(Box::new(error)),
        }
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Self::Input(Box::new(error))
    }
}

impl Failure {
    /// Returns true if this process must print the failure. The failure of a rank is printed by that rank and rank 0,
    /// an error that all processes have by rank 0, and any other failure by the process that found it.
    pub(crate) fn is_told_here(&self) -> bool {
        use LaunchError::{Failed, Panicked, Start};
        let Ok(Some(own)) = processes() else {
            return true;
        };
        match self {
            Self::Read(_) | Self::Agreed(_) => own.rank == 0,
            Self::Rank(error) => match &**error {
                Failed { rank, .. } | Panicked { rank, .. } | Start { rank, .. } => {
                    own.rank == 0 || own.rank == *rank
                }
                LaunchError::OtherSize { .. } => own.rank == 0,
                _ => true,
            },
            Self::Input(error) => match &**error {
                InputError::Launch(_) => own.rank == 0,
                _ => true,
            },
            Self::Unfinished(_) | Self::Stdout(_) => true,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Input(error) if is_of_full_disk(error) => 3,
            Self::Input(_) | Self::Read(_) | Self::Agreed(_) => 2,
            Self::Rank(_) | Self::Unfinished(_) | Self::Stdout(_) => 3,
        })
    }
}

/// Returns true if a file could not be written because there was no space for it.
fn is_of_full_disk(error: &InputError) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    let first: &(dyn std::error::Error + 'static) = error;
    let causes = std::iter::successors(Some(first), |error| error.source());
    let kinds = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds
        .map(std::io::Error::kind)
        .any(|kind| matches!(kind, FileTooLarge | QuotaExceeded | StorageFull))
}
