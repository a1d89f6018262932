//! What ranks compare of each other.

use burn_fsdp::Check;
use clap::ValueEnum;

use super::TrainArgs;

/// The choices of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckArg {
    /// The calls: that all ranks do the same operations with the same tensors
    Calls,
    /// The bytes, too: that each rank gets what the others gave. For memory or links that may be faulty
    Agreement,
}

impl TrainArgs {
    /// Returns what ranks compare: bytes, where they are to be written down.
    pub(crate) fn check(&self) -> Check {
        match self.output.operations {
            Some(_) => Check::Agreement,
            None => self.sharding.check.into(),
        }
    }
}

impl From<CheckArg> for Check {
    fn from(check: CheckArg) -> Self {
        match check {
            CheckArg::Calls => Self::Calls,
            CheckArg::Agreement => Self::Agreement,
        }
    }
}
