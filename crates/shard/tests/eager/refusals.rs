//! What is refused, and how the message reads.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::ProcessMesh;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, fully_shard, memory, wrap_plan};

use super::bench::{build, device, on_ranks, seed_turn};
use super::nets::{MLP, Mlp};

fn refusal<M: Module + 'static>(module: fn() -> M, policy: ShardPolicy) -> String {
    on_ranks(1, move |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        match fully_shard(module(), &mesh, policy.clone()) {
            Ok(_) => panic!("should be refused"),
            Err(error) => Ok(error.to_string()),
        }
    })
    .swap_remove(0)
}

#[test]
fn a_pattern_without_a_module_lists_the_modules() {
    let message = refusal(
        || Mlp::new(&device()),
        ShardPolicy::new().units(["layers.*"]),
    );
    assert!(message.contains("`layers.*`"), "{message}");
    assert!(message.contains("blocks.0.down"), "{message}");
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
}

#[test]
fn a_tied_parameter_is_named_by_both_paths() {
    let tied = || {
        let first = LinearConfig::new(3, 3).init(&device());
        let second = first.clone();
        Tied { first, second }
    };
    let message = refusal(tied, ShardPolicy::new());
    assert!(message.contains("`first.weight`"), "{message}");
    assert!(message.contains("`second.weight`"), "{message}");
}

#[test]
fn sharding_twice_is_refused() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        let model = build(MLP, &world, &device(), ShardPolicy::new())?;
        let error = fully_shard(model, &mesh, ShardPolicy::new()).expect_err("twice");
        assert!(matches!(error, Error::AlreadySharded { .. }), "{error}");
        Ok(())
    });
}

#[test]
fn an_adapter_is_refused_by_name() {
    let adapted = || {
        let model = Mlp::new(&device());
        model.apply_lora(burn::module::Lora::new(2, 4.0))
    };
    let message = refusal(adapted, ShardPolicy::new());
    assert!(message.contains("embed.weight"), "{message}");
    assert!(message.contains("materialize"), "{message}");
}

#[test]
fn a_plain_module_is_told_to_shard_first() {
    let error = memory(&Mlp::new(&device())).expect_err("plain");
    assert!(error.to_string().contains("fully_shard"), "{error}");
}

#[derive(Module, Debug)]
struct Lopsided {
    small: Linear,
    large: Param<Tensor<2>>,
}

#[test]
fn a_unit_with_most_parameters_is_warned_about() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        let device = device();
        let module = Lopsided {
            small: LinearConfig::new(2, 2).init(&device),
            large: Param::from_tensor(Tensor::zeros([20, 20], &device)),
        };
        let policy = ShardPolicy::new().units(["small"]);
        let _turn = (world.rank() == 0).then(seed_turn);
        let plan = wrap_plan(&fully_shard(module, &mesh, policy)?)?;
        assert!(
            plan.warnings[0].contains("unit `root` holds 400 of 406"),
            "{plan}"
        );
        assert!(plan.to_string().contains("warning: "), "{plan}");
        Ok(())
    });
}

#[test]
fn a_backend_without_operations_names_the_features() {
    let message = refusal(
        || LinearConfig::new(2, 2).init(&Device::capture().autodiff()),
        ShardPolicy::new(),
    );
    assert!(message.contains("`weight`"), "{message}");
    assert!(message.contains("`Capture`"), "{message}");
    assert!(message.contains("features `ndarray`"), "{message}");
}

/// With the backend's feature on, the same module is sharded.
#[cfg(feature = "ndarray")]
#[test]
fn a_backend_with_its_feature_on_trains() {
    use burn::optim::GradientsParams;
    use burn_fsdp_shard::backward;

    on_ranks(2, |world| {
        let device = Device::ndarray().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let model = LinearConfig::new(3, 5).init(&device);
        let model: Linear = fully_shard(model, &mesh, ShardPolicy::new())?;
        let loss = model.forward(Tensor::<2>::ones([2, 3], &device)).sum();
        let gradients: GradientsParams = backward(loss, &model)?;
        assert_eq!(gradients.len(), 2);
        Ok(())
    });
}
