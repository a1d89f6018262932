//! The groups of ranks in a training run.

use burn::module::Module;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{ShardPolicy, fully_shard};

use burn_fsdp_glue::error::Error;

pub(crate) const REPLICATE: &str = "replicate";
pub(crate) const SHARD: &str = "shard";

/// The groups that contain a rank.
pub(crate) struct Groups {
    /// The mesh over which the model is sharded.
    pub(crate) mesh: ProcessMesh,
    /// All ranks.
    pub(crate) world: ProcessGroup,
    /// The ranks among which this rank's replica is sharded.
    pub(crate) shards: ProcessGroup,
    /// The ranks with the same shards, in the order of the replicas; `None` if there is only one replica.
    pub(crate) replicas: Option<ProcessGroup>,
}

impl Groups {
    /// Shards a model over groups of consecutive ranks, each of which holds one of `replicas` replicas.
    ///
    /// Collective.
    pub(crate) fn shard<M: Module>(
        model: M,
        world: &ProcessGroup,
        replicas: usize,
        policy: ShardPolicy,
    ) -> Result<(M, Self), Error> {
        let (mesh, policy, of_replicas) = if replicas == 1 {
            let mesh = Mesh::line(SHARD, world.size())?;
            (ProcessMesh::new(world, mesh)?, policy, None)
        } else {
            let mesh = mesh(world, replicas)?;
            let of_replicas = mesh.along(REPLICATE)?.clone();
            let policy = policy.replicate_axis(REPLICATE);
            (mesh, policy, Some(of_replicas))
        };
        let model = fully_shard(model, &mesh, policy).map_err(of_loop)?;
        let groups = Self {
            world: world.clone(),
            shards: mesh.along(SHARD)?.clone(),
            replicas: of_replicas,
            mesh,
        };
        Ok((model, groups))
    }

    /// Returns true if this rank's replica is the first, which has rank 0.
    pub(crate) fn is_in_first_replica(&self) -> bool {
        let replicas = self.replicas.as_ref();
        replicas.is_none_or(|replicas| replicas.rank() == 0)
    }
}

/// Returns the mesh of several replicas, each of which is sharded over the same number of consecutive ranks.
///
/// Collective.
pub(crate) fn mesh(world: &ProcessGroup, replicas: usize) -> Result<ProcessMesh, Error> {
    let ranks = world.size();
    if replicas == 0 || !ranks.is_multiple_of(replicas) {
        return Err(Error::Replicas { replicas, ranks });
    }
    let mesh = Mesh::new([(REPLICATE, replicas), (SHARD, ranks / replicas)])?;
    Ok(ProcessMesh::new(world, mesh)?)
}

/// Returns the error for an axis that the policy names with the way out in Burn's loop, and any other error unchanged.
fn of_loop(error: burn_fsdp_shard::Error) -> Error {
    match error {
        burn_fsdp_shard::Error::Axis { axis, .. } => Error::AxisInTraining { axis },
        error => error.into(),
    }
}
