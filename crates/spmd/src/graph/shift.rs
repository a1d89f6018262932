//! Parts of a whole that begin elsewhere on each rank.

use std::sync::Arc;

/// The dependence of a slice on the rank: the operation has the ranges of the first rank of an axis, and those of `dim`
/// begin `len` elements later on every next one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AxisShift {
    /// The mesh axis.
    pub axis: Arc<str>,
    /// The dim that is cut.
    pub dim: usize,
    /// Length of each rank's part.
    pub len: usize,
}
