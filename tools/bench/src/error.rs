//! The errors of a benchmark.

use std::path::PathBuf;
use std::process::ExitCode;

use burn_fsdp::internals::collectives::LaunchError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{flag} is 0; it must be at least 1")]
    Zero { flag: &'static str },

    #[error(
        "{ranks} ranks do not divide a batch of {batch} sequences; choose a batch that is a multiple of the ranks"
    )]
    RanksDoNotDivideBatch { ranks: usize, batch: usize },

    #[error("--out and --svg name the same file, {}; name two files", path.display())]
    SameFile { path: PathBuf },

    #[error("{flag} {}: {source}", path.display())]
    Output {
        flag: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },

    #[error("there is no {}; build it with `cargo build --release`, or name it with --command", path.display())]
    NoCommand { path: PathBuf },

    #[error("cannot run {program}: {problem}")]
    CannotRun { program: String, problem: String },

    #[error(transparent)]
    Rank(#[from] LaunchError),

    #[error("cannot write to stdout: {0}")]
    Stdout(std::io::Error),
}

impl Error {
    /// Returns 3 if a rank failed or the result was lost, and 2 for all errors that the user can fix.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Rank(_) | Self::Stdout(_) => 3,
            _ => 2,
        })
    }
}
