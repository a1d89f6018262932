//! The replica axis of hybrid sharding.

use burn_fsdp_mesh::{Axis, Mesh};

use crate::error::Error;

/// The replica axis of hybrid sharding.
#[derive(Debug, Clone)]
pub struct Replicate {
    /// The mesh axis, whose size is the number of replicas.
    pub axis: Axis,
    /// True if the axis comes before the shard axis in the mesh.
    pub is_first: bool,
}

/// Returns a mesh of the shard axis and, before or after it, the replica axis if there is one.
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
