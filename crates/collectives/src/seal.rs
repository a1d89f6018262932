//! Seals: the checksums of values that lie in a rank's memory from one operation to another.

use std::fmt;

use crate::Operation;
use crate::checksum::Checksums;

/// The checksum of some bytes, and when it was taken. Who makes it with [`ProcessGroup::seal`](crate::ProcessGroup::seal)
/// keeps it beside the bytes, and holds the bytes or has them to itself, so that nobody else writes over them; what
/// [`ProcessGroup::check_seal`](crate::ProcessGroup::check_seal) then finds different has changed by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    pub(crate) checksums: Checksums,
    pub(crate) written: Moment,
}

/// A moment in the life of a rank: a step, and the operation that it had started last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moment {
    /// The step, as given to [`ProcessGroup::begin_step`](crate::ProcessGroup::begin_step), if it was.
    pub step: Option<u64>,
    /// The operation that the rank had started last, on any group; `None` before its first.
    pub after: Option<Operation>,
}

impl Seal {
    /// Returns true if the bytes are those that were sealed.
    pub(crate) fn is_of(&self, bytes: &[u8]) -> bool {
        self.checksums.are_of(bytes)
    }
}

/// Prints as `in step 3 after all_gather "x" (operation 7 of group "world")`.
impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(step) = self.step {
            write!(f, "in step {step} ")?;
        }
        match &self.after {
            Some(operation) => write!(f, "after {operation}"),
            None => f.write_str("before its first operation"),
        }
    }
}
