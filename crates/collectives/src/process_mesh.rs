//! A mesh whose ranks can communicate along its axes.

use burn_fsdp_mesh::Mesh;

use crate::{Error, ProcessGroup};

/// A [`Mesh`] and this rank's process groups along each of its axes.
///
/// In the mesh `replicate=2 x shard=4`, rank 6 has the group of ranks 4, 5, 6 and 7 along `shard` and
/// that of ranks 2 and 6 along `replicate`. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcessMesh {
    layout: Mesh,
    world: ProcessGroup,
    coordinate: Vec<usize>,
    /// One per axis.
    groups: Vec<ProcessGroup>,
}

impl ProcessMesh {
    /// Lays out the ranks of `world` as a mesh. Collective over `world`: one split per axis, none for
    /// an axis of all ranks, along which the group is `world` itself.
    ///
    /// # Errors
    ///
    /// [`Error::MeshSize`] if the mesh has not as many ranks as `world`; the errors of
    /// [`ProcessGroup::split`].
    pub fn new(world: &ProcessGroup, layout: Mesh) -> Result<Self, Error> {
        if layout.size() != world.size() {
            return Err(Error::MeshSize {
                mesh: layout.to_string(),
                mesh_size: layout.size(),
                group: world.name().to_owned(),
                group_size: world.size(),
            });
        }
        let coordinate = layout.coordinate(world.rank())?;
        let mut groups = Vec::with_capacity(coordinate.len());
        for axis in layout.axes() {
            groups.push(if axis.size == world.size() {
                world.clone()
            } else {
                // The layout says who the members are. That all ranks have the same is compared.
                let members = layout.ranks_along(&axis.name, world.rank())?;
                let label = format!("split into {} of {layout}", axis.name);
                world.split_known(members, axis.name.as_str().into(), label)?
            });
        }
        Ok(Self {
            layout,
            world: world.clone(),
            coordinate,
            groups,
        })
    }

    /// The mesh.
    pub fn layout(&self) -> &Mesh {
        &self.layout
    }

    /// The group of all ranks of the mesh.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Where this rank lies: one index per axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.coordinate
    }

    /// This rank's group along an axis: rank `i` of it has index `i` on the axis.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] if the mesh has no such axis.
    pub fn along(&self, axis: &str) -> Result<&ProcessGroup, Error> {
        self.layout.axis(axis)?;
        let index = self
            .layout
            .axes()
            .iter()
            .take_while(|other| other.name != axis)
            .count();
        Ok(&self.groups[index])
    }
}
