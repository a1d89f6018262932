//! Shards and their gradients in files.

use std::io::ErrorKind;

use burn::tensor::Tensor;
use burn_fsdp_tensors as tensors;
use thiserror::Error as ThisError;

/// A shard or a gradient that cannot be kept in a file ([`ShardPolicy::in_files`](crate::ShardPolicy::in_files)).
#[derive(Debug, ThisError)]
#[error(
    "rank {rank}: {what} of `{path}` (unit {unit}), in a file of {num_bytes} bytes in {folder}: {reason}; \
     {advice}"
)]
#[non_exhaustive]
pub struct ShardFileError {
    /// This rank.
    pub rank: usize,
    /// The kind of value.
    pub what: &'static str,
    /// Path of the parameter.
    pub path: String,
    /// Name of the unit.
    pub unit: String,
    /// Size of the value in bytes.
    pub num_bytes: usize,
    /// The folder of the policy.
    pub folder: String,
    /// The reason for the failure.
    pub reason: String,
    /// A remedy, shown to the user.
    pub advice: &'static str,
}

/// A rank's part of a parameter, in errors.
pub(crate) const SHARD: &str = "the shard";
/// A reduced gradient, in errors.
pub(crate) const GRADIENT: &str = "the gradient";
/// The elements of a 16-bit average in 32 bits, in errors.
pub(crate) const AVERAGE: &str = "the average in 32 bits";

/// The reason of an error about a file whose bytes differ from those written.
pub(crate) const CHANGED: &str = "its bytes changed after they were written";
/// The remedy for such a file.
pub(crate) const DAMAGED: &str = "check the disk, and resume from a checkpoint";

/// Returns the remedy for a file that cannot be written.
pub(crate) fn advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "create the folder, or name another in `ShardPolicy::in_files`"
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "free space on the disk, or name fewer parameters in `ShardPolicy::in_files`; resume from a checkpoint"
        }
        _ => "name a writable folder on a local disk in `ShardPolicy::in_files`",
    }
}

/// Returns the CRC-32 of a flat tensor without autodiff.
pub(crate) fn checksum(flat: &Tensor<1>) -> u32 {
    crc32fast::hash(tensors::source(flat.clone(), None).as_bytes())
}
