//! How one tensor lies on all axes of a mesh.

use std::fmt;
use std::sync::Arc;

use burn_fsdp_mesh::Placement;

/// How a tensor lies on one axis of a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPlacement {
    /// Name of the axis.
    pub axis: Arc<str>,
    /// Number of ranks along it.
    pub num_ranks: usize,
    /// How the tensor lies on it.
    pub placement: Placement,
}

/// Prints as `model: shard(1)`.
impl fmt::Display for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.axis, self.placement)
    }
}

/// Shape of one rank's part of a tensor: every dim that is cut is that many times shorter.
pub fn local_shape(shape: &[usize], placements: &[AxisPlacement]) -> Vec<usize> {
    let mut local = shape.to_vec();
    for placement in placements {
        if let Placement::Shard(dim) = placement.placement
            && let Some(size) = local.get_mut(dim)
        {
            *size /= placement.num_ranks;
        }
    }
    local
}
