//! What ranks compare of each other.

use burn_fsdp::collectives::Check;
use clap::ValueEnum;

/// The choices of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckArg {
    /// The calls: all ranks do the same operations with the same tensors
    Calls,
    /// Also the bytes: each rank gets what the others sent, and keeps what it wrote. Use it if memory or links may be
    /// faulty
    Agreement,
}

impl CheckArg {
    /// Returns what ranks compare: bytes, where what they carry is written down.
    pub(crate) fn check(self, is_written: bool) -> Check {
        match self {
            Self::Calls if !is_written => Check::Calls,
            Self::Calls | Self::Agreement => Check::Agreement,
        }
    }
}
