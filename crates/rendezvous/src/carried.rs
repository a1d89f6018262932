//! The checksums of the data that a rank's operations carried, for comparing runs.

use std::fmt;

use super::operation::Operation;

/// The checksums (64-bit XXH3) of the bytes that one operation of a rank carried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Carried {
    /// The operation that carried the bytes.
    pub operation: Operation,
    /// The step that the rank passed to `ProcessGroup::begin_step`, if any.
    pub step: Option<u64>,
    /// The checksum of each part that the rank sent: all parts for rank 0 of the group, then for rank 1, and so on.
    pub given: Vec<u64>,
    /// Checksums of the bytes that the rank received, one per part.
    pub got: Vec<u64>,
}

/// A callback that receives each completed operation of a rank.
pub(crate) struct Watcher(Box<dyn FnMut(Carried) + Send>);

impl Watcher {
    pub(crate) fn new(watch: impl FnMut(Carried) + Send + 'static) -> Self {
        Self(Box::new(watch))
    }

    pub(crate) fn tell(&mut self, carried: Carried) {
        (self.0)(carried);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
