//! Trained parameters that are neither sharded nor ignored.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, fully_shard, params_with_gradient, replicate};

use super::bench::{device, on_ranks, ready};
use super::nets::input;

#[derive(Module, Debug)]
struct Net {
    inner: Linear,
    head: Linear,
}

fn net() -> Net {
    ready(|| Net {
        inner: LinearConfig::new(4, 5).init(&device()),
        head: LinearConfig::new(5, 3).init(&device()),
    })
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

/// The number of parameters of `net` that get a gradient.
fn trained(net: &Net, world: &ProcessGroup) -> Result<usize, Error> {
    let x = net.inner.forward(input([2, 4], world.rank(), 0, &device()));
    let gradients = backward(net.head.forward(x).sum(), net)?;
    Ok(params_with_gradient(net, &gradients).len())
}

#[test]
fn a_new_unsharded_head_is_rejected() {
    on_ranks(2, |world| {
        let mut net = fully_shard(net(), &line(&world)?, ShardPolicy::new())?;
        assert_eq!(trained(&net, &world)?, 4);
        net.head = ready(|| LinearConfig::new(5, 3).init(&device()));
        let error = trained(&net, &world).expect_err("each rank's own");
        let message = error.to_string();
        assert!(matches!(error, Error::Unmanaged { .. }), "{message}");
        assert!(message.contains("`head.weight`"), "{message}");
        assert!(message.contains("`ShardPolicy::ignore`"), "{message}");
        // Both remedies.
        let mut frozen = net.clone();
        frozen.head = frozen.head.freeze();
        assert_eq!(trained(&frozen, &world)?, 2);
        net.head = replicate(net.head, &line(&world)?, ShardPolicy::new())?;
        assert_eq!(trained(&net, &world)?, 4);
        Ok(())
    });
}

#[test]
fn one_rank_may_train_unsharded_parameters() {
    on_ranks(1, |world| {
        let mut net = net();
        net.inner = fully_shard(net.inner, &line(&world)?, ShardPolicy::new())?;
        assert_eq!(trained(&net, &world)?, 4);
        Ok(())
    });
}

/// The policy also applies when a record has given the parameter another id.
#[test]
fn ignored_parameters_are_trained() {
    on_ranks(2, |world| {
        let record = net().into_record();
        let policy = ShardPolicy::new().ignore(["head"]);
        let sharded = fully_shard(net(), &line(&world)?, policy)?;
        assert_eq!(trained(&sharded, &world)?, 4);
        let loaded = sharded.load_record(record);
        assert_eq!(trained(&loaded, &world)?, 4);
        Ok(())
    });
}
