//! Operations on a part of a tensor that begins at a different offset on each rank.

use std::sync::Arc;

/// The offset of a slice on each rank. The operation has the ranges of the first rank along the axis. On each following
/// rank, the range of `dim` begins `len` elements later. An operation that rounds optimizer states in flat shards has the
/// offset of its first element.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AxisShift {
    /// The mesh axis.
    pub axis: Arc<str>,
    /// The dim along which ranks take different parts.
    pub dim: usize,
    /// Length of each rank's part.
    pub len: usize,
}
