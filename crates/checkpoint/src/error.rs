//! The errors of checkpoints.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::{Dtype, Region};

/// An error of writing or reading a checkpoint. Sizes and ranges are in bytes unless noted otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // === Storage ===
    /// The storage refused an operation.
    #[error("cannot {operation} {path}: {source}", path = path.display())]
    Io {
        /// The operation that failed, such as `write`.
        operation: &'static str,
        /// The file or folder of the operation.
        path: PathBuf,
        /// The storage's error.
        source: io::Error,
    },

    /// Another run or save is working in the same folder.
    #[error(
        "{path} is locked by another run or save in the same folder; wait until it ends, or give each run its own \
         checkpoint folder",
        path = path.display()
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
    },

    /// A step or an output that already exists.
    #[error("{path} already exists; choose another name, or allow replacing a file or an empty folder (`--overwrite`)", path = path.display())]
    Exists {
        /// The file or folder in the way.
        path: PathBuf,
    },

    /// A file or link that has the name of a step.
    #[error(
        "{path} has the name of a step but is {found}, and links are not followed; put the step itself there, or \
         rename it",
        path = path.display()
    )]
    NotAFolder {
        /// The path with the name of a step.
        path: PathBuf,
        /// A description of what the path is, such as `a link`.
        found: &'static str,
    },

    /// A step's folder that is to be removed or replaced, but contains something that does not belong to a step.
    #[error("{path} cannot be removed because it contains {name:?}, which is not part of a step; move it elsewhere", path = path.display())]
    Foreign {
        /// The folder that should be removed.
        path: PathBuf,
        /// Name of the file or folder that does not belong to a step.
        name: String,
    },

    /// An output inside a step, or with a step's name.
    #[error("{out} would be inside {step}, or have the name of a step; write it outside the steps", out = out.display(), step = step.display())]
    InsideStep {
        /// The path of the output.
        out: PathBuf,
        /// The step, or the folder of steps.
        step: PathBuf,
    },

    /// A folder for steps that is a step, or is inside one.
    #[error("{path} is inside the saved step {step}; give the folder that contains the step", path = path.display(), step = step.display())]
    NotForSteps {
        /// The rejected folder.
        path: PathBuf,
        /// The step that the folder is, or that contains it.
        step: PathBuf,
    },

    // === Damaged or foreign files ===
    /// A folder that is not a step: it has no index, or no checksum of the index.
    #[error("{path} is not a checkpoint, or does not exist: it has no {missing}; give the folder of a step, such as step-000100, or resume from another step", path = path.display())]
    NotACheckpoint {
        /// The folder that is not a step.
        path: PathBuf,
        /// Name of the missing file.
        missing: String,
    },

    /// A version of the format that this program does not support.
    #[error("{path} has format version {got}, but this program reads version {expected}; use a newer burn-fsdp", path = path.display())]
    Version {
        /// The index file.
        path: PathBuf,
        /// The supported version.
        expected: u32,
        /// The version in the index.
        got: u64,
    },

    /// Bytes that differ from the bytes that were written.
    #[error(
        "{path} is damaged: bytes {start} to {end}{of} have checksum {got:08x} instead of {expected:08x}; restore the file or resume from another step",
        path = path.display(), start = bytes.start, end = bytes.end, of = of_tensor(tensor)
    )]
    Checksum {
        /// The damaged file.
        path: PathBuf,
        /// The tensor that the bytes belong to; none for headers and the index.
        tensor: Option<String>,
        /// The bytes of the file that the checksum covers.
        bytes: Range<u64>,
        /// CRC-32 when the bytes were written.
        expected: u32,
        /// CRC-32 of the bytes now.
        got: u32,
    },

    /// A file whose length differs from the written length.
    #[error("{path} has {got} bytes instead of {expected}{of}; restore the file or resume from another step", path = path.display(), of = cut_tensor(tensor))]
    FileSize {
        /// The damaged file.
        path: PathBuf,
        /// The first tensor whose bytes are missing, if there is one.
        tensor: Option<String>,
        /// Size of the file when it was written, in bytes.
        expected: u64,
        /// Size of the file now, in bytes.
        got: u64,
    },

    /// A file that contradicts itself or the index.
    #[error("{path} is not valid{of}: {problem}; it is damaged or was not written by burn-fsdp", path = path.display(), of = of_tensor(tensor))]
    Invalid {
        /// The inconsistent file.
        path: PathBuf,
        /// The affected tensor, if there is a single one.
        tensor: Option<String>,
        /// What is wrong.
        problem: String,
    },

    /// A size above one of the reader's [`Limits`](crate::Limits).
    #[error("{path}: {what} is {got} but at most {limit} is read; if you trust the file, raise the limit", path = path.display())]
    Limit {
        /// The file that is too large, or contains something that is.
        path: PathBuf,
        /// The quantity that exceeds the limit.
        what: &'static str,
        /// The largest size that is read.
        limit: u64,
        /// The size in the file.
        got: u64,
    },

    // === Requests ===
    /// A folder of checkpoints without a whole step.
    #[error("{path} has no complete step; save one first or give another folder", path = path.display())]
    NoStep {
        /// The folder of checkpoints.
        path: PathBuf,
    },

    /// A folder of checkpoints in which every step is damaged.
    #[error(
        "{path} has {count} steps, but none of them is complete; the newest: {newest}; repair a step, or start in \
         another folder",
        path = path.display()
    )]
    NoGoodStep {
        /// The folder of checkpoints.
        path: PathBuf,
        /// Number of damaged steps.
        count: usize,
        /// The damage of the newest step.
        newest: Box<Error>,
    },

    /// Tensors of the model that the checkpoint lacks.
    #[error(
        "{path} lacks {count} tensors that the model has: {list}; load it into the model that it was saved from, or \
         exclude these",
        path = path.display(), count = names.len(), list = list(names)
    )]
    Missing {
        /// Folder of the step.
        path: PathBuf,
        /// Names of the missing tensors.
        names: Vec<String>,
    },

    /// Tensors of the checkpoint that the model lacks.
    #[error(
        "{path} has {count} tensors that the model lacks: {list}; load it into the model that it was saved from, or \
         allow them",
        path = path.display(), count = names.len(), list = list(names)
    )]
    Unexpected {
        /// Folder of the step.
        path: PathBuf,
        /// Names of the additional tensors.
        names: Vec<String>,
    },

    /// A tensor whose shape differs between the checkpoint and the model.
    #[error(
        "tensor {tensor:?} has shape {got:?} in {path} but {expected:?} in the model; build the model with the \
         checkpoint's configuration",
        path = path.display()
    )]
    Shape {
        /// Folder of the step.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Shape in the model.
        expected: Vec<usize>,
        /// Shape in the checkpoint.
        got: Vec<usize>,
    },

    /// A tensor whose element type differs between the checkpoint and the model.
    #[error("tensor {tensor:?} is {got} in {path} but {expected} in the model; build the model with that dtype", path = path.display())]
    Type {
        /// Folder of the step.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Element type in the model.
        expected: Dtype,
        /// Element type in the checkpoint.
        got: Dtype,
    },

    /// A region that a tensor does not have.
    #[error(
        "tensor {tensor:?} of shape {shape:?} has no {region}: {problem}; request elements inside its shape"
    )]
    Region {
        /// Name of the tensor.
        tensor: String,
        /// Shape of the tensor, in elements.
        shape: Vec<usize>,
        /// The requested region.
        region: Region,
        /// What is wrong with the region.
        problem: String,
    },

    /// Data or a buffer whose size differs from the size of its part.
    #[error(
        "{region} of tensor {tensor:?} takes {expected} bytes, but {got} were given; leave out padding"
    )]
    Length {
        /// Name of the tensor.
        tensor: String,
        /// The region of the part.
        region: Region,
        /// Size of the part in bytes.
        expected: usize,
        /// Size of the data or buffer in bytes.
        got: usize,
    },

    /// A tensor that cannot be saved as described.
    #[error("cannot save tensor {tensor:?}: {problem}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// The problem and its remedy.
        problem: String,
    },

    /// A failure of the source of a tensor's data.
    #[error("cannot get the data of tensor {tensor:?} to save: {source}")]
    Source {
        /// Name of the tensor.
        tensor: String,
        /// The error that the source returned.
        source: BoxError,
    },

    /// An argument that does not match the call or the other arguments.
    #[error("{argument} should be {expected} but is {got}; correct the call")]
    Argument {
        /// Name of the argument.
        argument: &'static str,
        /// The valid arguments.
        expected: String,
        /// The invalid argument.
        got: String,
    },

    /// An invalid mesh or partition.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),

    // === Several ranks ===
    /// A failure of another rank to save; nothing was committed.
    #[error(
        "step {step} was not saved because rank {rank} failed: {reason}; older steps are unchanged; fix that \
         failure and save again"
    )]
    PeerFailed {
        /// The step that was to be saved.
        step: u64,
        /// The rank that failed.
        rank: usize,
        /// The message of the failed rank's error.
        reason: String,
    },

    /// A failure of the ranks to communicate.
    #[error(
        "rank {rank} could not meet the other ranks to save step {step}: {source}; older steps are unchanged"
    )]
    Rendezvous {
        /// The step that was to be saved.
        step: u64,
        /// The rank that reports the error.
        rank: usize,
        /// The error that the rendezvous returned.
        source: BoxError,
    },

    /// A panic on the thread of a background save.
    #[error("saving step {step} in the background panicked: {reason}; older steps are unchanged")]
    Panicked {
        /// The step that was to be saved.
        step: u64,
        /// The message of the panic.
        reason: String,
    },
}

/// An error from the caller's code that this crate calls.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    /// Returns true if a file is missing, damaged, too large or of another format, so another step may be good.
    ///
    /// False for a file that cannot be read *now* (missing permission, an unavailable network disk, a disk error): it
    /// may not be damaged, and a caller that skipped the step could lose it.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::NotACheckpoint { .. }
            | Self::Version { .. }
            | Self::Checksum { .. }
            | Self::FileSize { .. }
            | Self::Invalid { .. }
            | Self::Limit { .. } => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                // `InvalidInput` means that the entry is not a regular file.
                io::ErrorKind::NotFound
                    | io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::InvalidInput
            ),
            _ => false,
        }
    }

    pub(crate) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            operation,
            path,
            source,
        }
    }

    pub(crate) fn invalid(path: &Path, problem: impl Into<String>) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            tensor: None,
            problem: problem.into(),
        }
    }

    pub(crate) fn invalid_tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            tensor: Some(tensor.to_owned()),
            problem: problem.into(),
        }
    }
}

fn of_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or_else(String::new, |name| {
        format!(" (tensor {:?})", crate::shortened(name))
    })
}

fn cut_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or_else(String::new, |name| {
        format!(", cut in tensor {:?}", crate::shortened(name))
    })
}

/// Quotes the first few names.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names
        .iter()
        .take(SHOWN)
        .map(|name| format!("{:?}", crate::shortened(name)))
        .collect();
    if names.len() > SHOWN {
        format!("{}, ...", shown.join(", "))
    } else {
        shown.join(", ")
    }
}
