//! The ranks that run a step together, as a group and as a mesh.

use std::sync::Arc;

use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;

use crate::error::Error;

/// The mesh axis of data parallelism.
pub(crate) const DATA_AXIS: &str = "data";

/// The ranks that run a step together.
#[derive(Debug, Clone)]
pub(crate) struct Ranks {
    group: ProcessGroup,
    /// `None` if all ranks are along [`DATA_AXIS`].
    mesh: Option<ProcessMesh>,
}

impl Ranks {
    /// Uses all ranks of a group, along [`DATA_AXIS`].
    pub(crate) fn line(group: ProcessGroup) -> Self {
        Self { group, mesh: None }
    }

    /// Uses the ranks of a mesh.
    pub(crate) fn of_mesh(mesh: ProcessMesh) -> Self {
        Self {
            group: mesh.world().clone(),
            mesh: Some(mesh),
        }
    }

    /// Returns the group of all ranks.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns this rank's number in the group of all ranks.
    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.group.size()
    }

    /// Returns true if collectives transfer bytes while the ranks compute.
    pub(crate) fn overlaps(&self) -> bool {
        self.group.overlaps()
    }

    /// Returns the mesh of the ranks.
    pub(crate) fn mesh(&self) -> Result<Mesh, Error> {
        match &self.mesh {
            Some(mesh) => Ok(mesh.mesh().clone()),
            None => Ok(Mesh::line(DATA_AXIS, self.group.size())?),
        }
    }

    /// Returns the groups of ranks along every axis.
    pub(crate) fn axes(&self) -> Result<Vec<(Arc<str>, ProcessGroup)>, Error> {
        let axes = self.mesh()?.axes().to_vec().into_iter().map(|axis| {
            let group = self.along(&axis.name)?.clone();
            Ok((Arc::from(axis.name), group))
        });
        axes.collect()
    }

    /// Returns the group of ranks along an axis.
    pub(crate) fn along(&self, axis: &str) -> Result<&ProcessGroup, Error> {
        match &self.mesh {
            Some(mesh) => mesh.along(axis).map_err(Error::among_ranks),
            None => Ok(&self.group),
        }
    }
}
