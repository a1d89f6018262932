//! The comparisons among ranks.

use burn_fsdp::Check;
use clap::ValueEnum;

/// The choices of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckArg {
    /// The calls: all ranks start the same operations with the same tensors
    Calls,
    /// Also the bytes that ranks send, receive and keep. Use it if memory or links may be faulty
    Agreement,
}

impl CheckArg {
    /// Returns what ranks compare: also bytes if their operations are written to files.
    pub(crate) fn check(self, is_written: bool) -> Check {
        match self {
            Self::Calls if !is_written => Check::Calls,
            Self::Calls | Self::Agreement => Check::Agreement,
        }
    }
}
