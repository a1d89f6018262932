//! Errors of writing graphs to files.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why graphs could not be written. No partially written plan is left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// A folder or file that cannot be written.
    #[error(
        "cannot write graphs to {}: {reason}; choose a writable folder with enough space, or do not write graphs",
        path.display()
    )]
    Write {
        /// The folder or file.
        path: PathBuf,
        /// The system's message.
        reason: String,
    },

    /// Something other than a graph where an earlier run's graphs belong.
    #[error(
        "cannot replace the graphs of an earlier run in {}: {} was not written with them; move it away, or choose \
         another folder",
        folder.display(),
        path.display()
    )]
    InTheWay {
        /// The folder that graphs are written to.
        folder: PathBuf,
        /// The file or folder in the way.
        path: PathBuf,
    },
}

impl DumpError {
    pub(crate) fn write(path: &Path, error: &io::Error) -> Self {
        Self::Write {
            path: path.to_owned(),
            reason: error.to_string(),
        }
    }
}
