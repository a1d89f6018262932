//! A mesh whose ranks can communicate along its axes.

use std::borrow::Cow;

use burn_fsdp_mesh::Mesh;

use super::process_group::ProcessGroup;
use burn_fsdp_rendezvous::Error;

/// A [`Mesh`] and this rank's process group along each of its axes.
///
/// For example, in the mesh `replicate=2 x shard=4`, rank 6 has the group of ranks 4, 5, 6 and 7 along `shard`, and the
/// group of ranks 2 and 6 along `replicate`. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcessMesh {
    mesh: Mesh,
    world: ProcessGroup,
    coordinate: Vec<usize>,
    /// The groups of this rank, one per axis.
    groups: Vec<ProcessGroup>,
}

impl ProcessMesh {
    /// Arranges the ranks of `world` as a mesh. Collective over `world`: one split per axis, except for an axis of all
    /// ranks, whose group is `world` itself.
    ///
    /// # Errors
    ///
    /// [`Error::MeshSize`] if the numbers of ranks of the mesh and of `world` differ; the errors of
    /// [`ProcessGroup::split`].
    pub fn new(world: &ProcessGroup, mesh: Mesh) -> Result<Self, Error> {
        if mesh.size() != world.size() {
            return Err(Error::MeshSize {
                mesh: mesh.to_string(),
                mesh_size: mesh.size(),
                group: world.name().to_owned(),
                group_size: world.size(),
            });
        }
        let coordinate = mesh.coordinate(world.rank())?;
        let mut groups = Vec::with_capacity(coordinate.len());
        for axis in mesh.axes() {
            groups.push(if axis.size == world.size() {
                world.clone()
            } else {
                // The mesh determines the members. The ranks compare it, so all have the same mesh.
                let members = mesh.ranks_along(&axis.name, world.rank())?;
                let label = format!("split into {} of {mesh}", axis.name);
                world.split_known(members, axis.name.as_str().into(), label)?
            });
        }
        Ok(Self {
            mesh,
            world: world.clone(),
            coordinate,
            groups,
        })
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the group of all ranks of the mesh.
    pub fn world(&self) -> &ProcessGroup {
        &self.world
    }

    /// Returns the coordinate of this rank: one index per axis.
    pub fn coordinate(&self) -> &[usize] {
        &self.coordinate
    }

    /// Returns this rank's group along an axis. Rank `i` of the group has index `i` on the axis.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] if the mesh does not have this axis.
    pub fn along(&self, axis: &str) -> Result<&ProcessGroup, Error> {
        self.mesh.axis(axis)?;
        let index = self
            .mesh
            .axes()
            .iter()
            .take_while(|other| other.name != axis)
            .count();
        Ok(&self.groups[index])
    }
}

/// Ranks that a module can be sharded over: the ranks of a [`ProcessMesh`], or the ranks of a [`ProcessGroup`] as a
/// line.
pub trait AsMesh {
    /// Returns the mesh. The mesh of a group has one axis, named `axis`. No rank waits for the others.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] if a mesh with this axis is not valid.
    fn as_mesh(&self, axis: &str) -> Result<Cow<'_, ProcessMesh>, Error>;
}

impl AsMesh for ProcessMesh {
    fn as_mesh(&self, _axis: &str) -> Result<Cow<'_, ProcessMesh>, Error> {
        Ok(Cow::Borrowed(self))
    }
}

impl AsMesh for ProcessGroup {
    fn as_mesh(&self, axis: &str) -> Result<Cow<'_, ProcessMesh>, Error> {
        let mesh = Mesh::new([(axis, self.size())])?;
        Ok(Cow::Owned(ProcessMesh::new(self, mesh)?))
    }
}
