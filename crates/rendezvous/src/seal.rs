//! Seals: the checksums of values that a rank keeps in memory between operations.

use std::fmt;

use super::checksum::Checksums;
use super::label::Label;
use super::operation::Operation;

/// The checksum of some bytes, and the moment when it was computed. Created by
/// `ProcessGroup::seal`.
///
/// The owner keeps the seal with the bytes. It holds a reference to the bytes or owns them exclusively, so nothing else
/// overwrites them. A difference that `ProcessGroup::check_seal` then finds is
/// corruption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    checksums: Checksums,
    written: Moment,
}

/// A seal with a description of its value, as errors print it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// The seal.
    pub seal: Seal,
    /// The value's kind, its path and its unit.
    pub what: Label,
}

/// A moment in the life of a rank: a step, and the last operation that the rank had started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moment {
    /// The step that was passed to `ProcessGroup::begin_step`, if any.
    pub step: Option<u64>,
    /// The last operation that the rank had started, on any group; `None` before the first.
    pub after: Option<Operation>,
}

impl Moment {
    /// Creates the moment after an operation, in a step.
    pub fn new(step: Option<u64>, after: Option<Operation>) -> Self {
        Self { step, after }
    }
}

impl Seal {
    /// Returns the seal of bytes with these checksums, written at this moment.
    pub fn new(checksums: Checksums, written: Moment) -> Self {
        Self { checksums, written }
    }

    /// Returns the checksums of the bytes.
    pub fn checksums(&self) -> &Checksums {
        &self.checksums
    }

    /// Returns the moment when the bytes were written or last checked.
    pub fn written(&self) -> &Moment {
        &self.written
    }

    /// Returns true if the bytes match the seal.
    pub fn is_of(&self, bytes: &[u8]) -> bool {
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
