//! The errors of this crate.

use std::io;
use std::path::PathBuf;

/// An error in the metrics of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file or folder cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file has no bytes.
    #[error("{} is empty; wait until the first step is complete, or name another file", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file has no line of a step.
    #[error(
        "{} has no line with a step and a loss, such as {{\"step\":0,\"loss\":5.5}}; name a file that `train --metrics \
         FILE` wrote",
        path.display()
    )]
    NotMetrics {
        /// The file.
        path: PathBuf,
    },
    /// The folder has no metrics file.
    #[error(
        "{} contains no metrics file (*.jsonl); name the file that `train --metrics FILE` wrote",
        path.display()
    )]
    NoneInFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has several metrics files.
    #[error("{} contains {} metrics files ({}); name one", path.display(), names.len(), names.join(", "))]
    SeveralInFolder {
        /// The folder.
        path: PathBuf,
        /// The names of the files.
        names: Vec<String>,
    },
}
