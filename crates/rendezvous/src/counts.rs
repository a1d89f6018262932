//! Counts of the operations that a rank has started.

use std::fmt;
use std::ops::Add;

use super::operation::OperationKind;

/// A number of operations, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Number of operations started.
    pub operations: u64,
    /// Bytes of the operations' full tensors; for exchanges, the bytes that this rank sent.
    pub bytes: u64,
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// The operations that a rank has started on a group, by kind. This is a snapshot: to count the operations between two
/// moments, take a snapshot at each and subtract with [`since`](Self::since).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationCounts([Tally; OperationKind::ALL.len()]);

impl OperationCounts {
    /// Returns the tally of the operations of one kind.
    pub fn of(&self, kind: OperationKind) -> Tally {
        self.0[kind as usize]
    }

    /// Returns the tally of the operations of all kinds together.
    pub fn total(&self) -> Tally {
        self.0
            .iter()
            .fold(Tally::default(), |total, tally| total + *tally)
    }

    /// Returns the operations added since an earlier snapshot of the same group.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = *self;
        for (tally, earlier) in counts.0.iter_mut().zip(&earlier.0) {
            tally.operations = tally.operations.saturating_sub(earlier.operations);
            tally.bytes = tally.bytes.saturating_sub(earlier.bytes);
        }
        counts
    }

    /// Counts an operation of this kind, with its bytes.
    pub fn count(&mut self, kind: OperationKind, bytes: usize) {
        let tally = &mut self.0[kind as usize];
        *tally = *tally
            + Tally {
                operations: 1,
                bytes: bytes as u64,
            };
    }
}

/// Adds the counts of two groups.
impl Add for OperationCounts {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        for (tally, other) in self.0.iter_mut().zip(other.0) {
            *tally = *tally + other;
        }
        self
    }
}

/// Prints as `3 all_gather (120 bytes), 1 barrier`, or `none`.
impl fmt::Display for OperationCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for kind in OperationKind::ALL {
            let Tally { operations, bytes } = self.of(kind);
            if operations > 0 {
                write!(f, "{separator}{operations} {kind}")?;
                separator = ", ";
            }
            if bytes > 0 {
                write!(f, " ({bytes} bytes)")?;
            }
        }
        match separator {
            "" => f.write_str("none"),
            _ => Ok(()),
        }
    }
}
