//! The model that a run trains: its initial weights, its device, the mesh of ranks and its division
//! over them.

use burn::tensor::Device;
use burn_fsdp::inspect::auto_units;
use burn_fsdp::{Mesh, ProcessGroup, ProcessMesh, ShardPolicy, fully_shard};
use burn_fsdp_models::{Gpt, ModelError};

use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::ranks;

/// Makes the model on a device, lazily where its weights are drawn.
///
/// Only rank 0's values count, so only rank 0 reads the file.
pub(crate) fn initial(
    config: &TrainConfig,
    device: &Device,
    rank: usize,
) -> Result<Gpt, ModelError> {
    match &config.init {
        Some(file) if rank == 0 => file.load(device),
        _ => config.model.init(device, config.seed),
    }
}

/// Returns the rank's device as one that can recompute, so that the eager engine may drop full
/// parameters after forward.
pub(crate) fn device(config: &TrainConfig, world: &ProcessGroup) -> Device {
    config.device(world).autodiff().gradient_checkpointing()
}

/// Divides a model as the configuration says.
pub(crate) fn shard(
    config: &TrainConfig,
    mesh: &ProcessMesh,
    model: Gpt,
) -> Result<Gpt, RankError> {
    let sharding = &config.sharding;
    let units = match sharding.unit_size {
        None => vec!["blocks.*".to_owned()],
        Some(least) => auto_units(&model, least),
    };
    let policy = ShardPolicy::new()
        .units(units)
        .strategy(sharding.strategy)
        .prefetch(sharding.prefetch)
        .precision(sharding.precision.clone());
    let policy = match sharding.replicas {
        1 => policy,
        _ => policy.replicate_axis("replicate"),
    };
    Ok(fully_shard(model, mesh, policy)?)
}

/// Makes the mesh of the ranks that the configuration asks for.
pub(crate) fn mesh(config: &TrainConfig, world: &ProcessGroup) -> Result<ProcessMesh, RankError> {
    let replicas = config.sharding.replicas;
    if config.sharding.is_by_host && config.ranks.are_processes() {
        check_hosts(ranks::hosts(world)?, world.size() / replicas)?;
    }
    let layout = match replicas {
        1 => Mesh::line("shard", world.size())?,
        _ => Mesh::new([("replicate", replicas), ("shard", world.size() / replicas)])?,
    };
    Ok(ProcessMesh::new(world, layout)?)
}

/// Checks that each machine has this many ranks, one machine after the other.
fn check_hosts(hosts: &[String], each: usize) -> Result<(), RankError> {
    let mut seen: Vec<&String> = Vec::new();
    let is_even = hosts.chunks(each.max(1)).all(|chunk| {
        let is_new = !seen.contains(&&chunk[0]);
        seen.push(&chunk[0]);
        is_new && chunk.len() == each && chunk.iter().all(|host| *host == chunk[0])
    });
    match is_even {
        true => Ok(()),
        false => Err(RankError::Hosts {
            hosts: hosts.join(", "),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::check_hosts;

    #[test]
    fn each_machine_has_as_many_ranks_one_after_the_other() {
        let check = |names: &str, each| {
            let hosts: Vec<_> = names.chars().map(String::from).collect();
            check_hosts(&hosts, each).is_ok()
        };
        assert!(check("aabb", 2));
        assert!(check("abc", 1));
        assert!(check("aaaa", 4));
        for (names, each) in [
            ("abab", 2),
            ("aaab", 2),
            ("aabbb", 2),
            ("aabbaa", 2),
            ("aaaa", 2),
        ] {
            assert!(!check(names, each), "{names}");
        }
    }
}
