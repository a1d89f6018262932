//! The axis of copies in hybrid sharding.

use burn_fsdp_mesh::{Axis, Mesh};

use crate::error::Error;

/// The axis of copies in hybrid sharding.
#[derive(Debug, Clone)]
pub struct Replicate {
    /// The axis, with the number of copies.
    pub axis: Axis,
    /// True if the axis comes before the shard axis in the mesh.
    pub is_first: bool,
}

/// Returns the mesh of the shard axis, with the axis of copies before or after it.
pub(super) fn mesh_of(
    (name, num_ranks): (&str, usize),
    replicate: Option<&Replicate>,
) -> Result<Mesh, Error> {
    let mut axes = vec![(name.to_owned(), num_ranks)];
    if let Some(Replicate { axis, is_first }) = replicate {
        axes.insert(usize::from(!is_first), (axis.name.clone(), axis.size));
    }
    Ok(Mesh::new(axes)?)
}
