//! The model that a run trains: its initial weights, its device, the mesh of ranks and its sharding over them.

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp::inspect::auto_units;
use burn_fsdp::internals::sharding::fully_shard_from;
use burn_fsdp::{Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, fully_shard};
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, WeightsFile, write_initial_weights};

use crate::error::RankError;
use crate::train::config::TrainConfig;
use crate::train::ranks;
use crate::weights;

/// Writes the initial weights if `--save-init` is set. They are recreated from the same seed or file.
pub(crate) fn save_initial(config: &TrainConfig) -> Result<(), ModelError> {
    match config.model {
        ModelConfig::Gpt(sizes) => save_initial_of(sizes, config),
        ModelConfig::Llama(sizes) => save_initial_of(sizes, config),
        ModelConfig::Gpt2(sizes) => save_initial_of(sizes, config),
    }
}

fn save_initial_of<A: Architecture>(sizes: A, config: &TrainConfig) -> Result<(), ModelError> {
    let Some(path) = &config.save_init else {
        return Ok(());
    };
    write_initial_weights(sizes, config.seed, config.init.as_deref(), path)
}

/// Returns the rank's device, with recomputation enabled, which allows the eager engine to drop full parameters after
/// forward.
pub(crate) fn device(config: &TrainConfig, world: &ProcessGroup) -> Device {
    config.device(world).autodiff().gradient_checkpointing()
}

/// Creates the model and shards it. If the weights come from a file, each rank reads its shards. Otherwise rank 0 draws
/// the weights and sends the shards. Collective.
pub(crate) fn sharded<A: Architecture>(
    sizes: A,
    config: &TrainConfig,
    world: &ProcessGroup,
    mesh: &ProcessMesh,
) -> Result<A::Model, RankError> {
    let device = device(config, world);
    if config.adapters.is_some() && world.rank() == 0 {
        // Only rank 0 draws the initial factors, with Burn's generator.
        device.seed(config.seed);
    }
    let Some(path) = &config.init else {
        return shard(sizes, config, mesh, sizes.init(&device, config.seed)?);
    };
    let blank = sizes.blank(&device)?;
    let adapters = config.adapter_sizes();
    if adapters.is_some_and(|sizes| sizes.base_bits().is_some()) {
        // Each shard is quantized before the next one is read.
        let file = WeightsFile::open(path, sizes)?;
        let policy = policy(sizes, config, &blank);
        return fully_shard_from(blank, mesh, policy, |part| {
            weights::read_initial(&file, config.factors(), part)
        });
    }
    let model = shard(sizes, config, mesh, blank)?;
    weights::read_shards(sizes, path, config.factors(), model)
}

/// Shards a model as configured.
pub(crate) fn shard<A: Architecture>(
    sizes: A,
    config: &TrainConfig,
    mesh: &ProcessMesh,
    model: A::Model,
) -> Result<A::Model, RankError> {
    let policy = policy(sizes, config, &model);
    Ok(fully_shard(model, mesh, policy)?)
}

/// Returns the policy that shards a model as configured.
fn policy<A: Architecture>(sizes: A, config: &TrainConfig, model: &A::Model) -> ShardPolicy {
    let sharding = &config.sharding;
    let mut policy = ShardPolicy::new()
        .units(units::<A, _>(config, model))
        .strategy(sharding.strategy)
        .prefetch(sharding.prefetch)
        .precision(sharding.precision.clone());
    // If every rank has all parameters whole, no owner is needed.
    let owned = config.optimizer.owned();
    if sharding.strategy != Strategy::NoShard && !owned.is_empty() {
        policy = policy.one_owner(owned);
    }
    if sharding.replicas > 1 {
        policy = policy.replicate_axis("replicate");
    }
    match config.adapter_sizes() {
        Some(adapters) => adapters.attached_by(policy, sizes),
        None => policy,
    }
}

/// Returns the path patterns of the modules that become units.
fn units<A: Architecture, M: Module>(config: &TrainConfig, model: &M) -> Vec<String> {
    match config.sharding.unit_size {
        None => vec![A::BLOCKS.to_owned()],
        Some(least) => auto_units(model, least),
    }
}

/// Creates the mesh of ranks for the configuration.
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

/// Checks that each machine has this many ranks, with consecutive numbers.
fn check_hosts(hosts: &[String], each: usize) -> Result<(), RankError> {
    let mut seen: Vec<&String> = Vec::new();
    let is_even = hosts.chunks(each.max(1)).all(|chunk| {
        let is_new = !seen.contains(&&chunk[0]);
        seen.push(&chunk[0]);
        is_new && chunk.len() == each && chunk.iter().all(|host| *host == chunk[0])
    });
    if is_even {
        Ok(())
    } else {
        Err(RankError::Hosts {
            hosts: hosts.join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::check_hosts;

    #[test]
    fn each_host_must_have_equally_many_consecutive_ranks() {
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
