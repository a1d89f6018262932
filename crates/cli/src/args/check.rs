//! The comparisons among ranks.

use burn_fsdp::Check;
use clap::ValueEnum;

/// The choices of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckArg {
    /// Check that all ranks start the same operations with tensors of the same sizes
    Calls,
    /// Also compare the bytes that ranks send, receive and keep, in case memory or links are faulty
    Agreement,
}

impl CheckArg {
    /// Returns the check that ranks perform. Operations that are written to files need [`Check::Agreement`].
    pub(crate) fn check(self, is_written: bool) -> Check {
        match self {
            Self::Calls if !is_written => Check::Calls,
            Self::Calls | Self::Agreement => Check::Agreement,
        }
    }
}
