//! Slices that begin at a different offset on each rank.

use std::sync::Arc;

/// The offset of a slice on each rank. The operation has the ranges of the first rank along the axis. On each following
/// rank, the range of `dim` begins `len` elements later.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AxisShift {
    /// The mesh axis.
    pub axis: Arc<str>,
    /// The dim along which ranks take different parts.
    pub dim: usize,
    /// Length of each rank's part.
    pub len: usize,
}
