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
        if replicas == 1 {
            let groups = Self {
                world: world.clone(),
                shards: world.clone(),
                replicas: None,
            };
            return Ok((fully_shard(model, world, policy)?, groups));
        }
        let ranks = world.size().checked_div(replicas).unwrap_or_default();
        let mesh = Mesh::new([(REPLICATE, replicas), (SHARD, ranks)])?;
        let mesh = ProcessMesh::new(world, mesh)?;
        let groups = Self {
            world: world.clone(),
            shards: mesh.along(SHARD)?.clone(),
            replicas: Some(mesh.along(REPLICATE)?.clone()),
        };
        let policy = policy.replicate_axis(REPLICATE);
        Ok((fully_shard(model, &mesh, policy)?, groups))
    }

    /// Returns true if this rank's replica is the first, which has rank 0.
    pub(crate) fn is_in_first_replica(&self) -> bool {
        let replicas = self.replicas.as_ref();
        replicas.is_none_or(|replicas| replicas.rank() == 0)
    }
}
