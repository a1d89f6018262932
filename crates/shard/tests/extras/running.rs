//! Sharding a module with running states leaves everything else unchanged.

use burn::module::{Module, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PositionalEncoding,
    PositionalEncodingConfig,
};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, catch, fully_shard, params_with_gradient};

use super::bench::{device, on_ranks, ready};
use super::nets::input;

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

#[derive(Module, Debug)]
struct Normed {
    inner: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
    index: Param<Tensor<1, Int>>,
}

impl Normed {
    fn new(device: &Device) -> Self {
        Self {
            inner: LinearConfig::new(4, 6).init(device),
            norm: BatchNormConfig::new(6).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            head: LinearConfig::new(6, 3).init(device),
            index: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([2, 1, 0], device),
            ),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.inner.forward(x);
        let [rows, columns] = x.dims();
        let x = self.norm.forward(x.reshape([rows, columns, 1]));
        let x = self.dropout.forward(x.reshape([rows, columns]));
        self.head.forward(x).select(1, self.index.val())
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32")
}

#[test]
fn a_module_in_validation_mode_stays_in_it() {
    on_ranks(2, |world| {
        let plain = device().without_autodiff();
        let model = ready(|| Normed::new(&device())).valid();
        let x = input([8, 4], 0, 0, &plain);
        let want = values(model.forward(x.clone()));
        let sharded = fully_shard(model, &line(&world)?, ShardPolicy::new())?;
        // No dropout, and running statistics that are used and not updated.
        for _ in 0..2 {
            // Rank 1 has rank 0's values.
            let got = values(sharded.forward(x.clone()));
            assert!(world.rank() > 0 || got == want, "{got:?}, {want:?}");
        }
        assert!(!sharded.norm.gamma.val().is_autodiff());
        Ok(())
    });
}

#[test]
fn a_module_on_a_plain_device_stays_there() {
    on_ranks(2, |world| {
        let plain = Device::flex();
        let model = ready(|| Normed::new(&plain));
        let model = fully_shard(model, &line(&world)?, ShardPolicy::new())?;
        assert!(!model.inner.weight.val().is_autodiff());
        model.forward(input([8, 4], 0, 0, &plain));
        let refused = backward(model.forward(input([8, 4], 0, 0, &plain)).sum(), &model);
        let message = refused.expect_err("no graph").to_string();
        assert!(message.contains("without autodiff"), "{message}");
        assert!(message.contains("gradient_checkpointing"), "{message}");
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Mixed {
    norm: BatchNorm,
    positions: PositionalEncoding,
    layer: Linear,
}

#[test]
fn a_constant_tensor_keeps_its_strategy() {
    on_ranks(2, |world| {
        let device = device();
        let positions = PositionalEncodingConfig::new(8).with_max_sequence_size(4);
        let model = ready(|| Mixed {
            norm: BatchNormConfig::new(4).init(&device),
            positions: positions.init(&device),
            layer: LinearConfig::new(8, 8).init(&device),
        });
        let model = fully_shard(model, &line(&world)?, ShardPolicy::new())?;
        let x = model
            .layer
            .forward(input([2, 4, 8], world.rank(), 0, &device));
        let x = model.norm.forward(model.positions.forward(x));
        let gradients = backward(x.sum(), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), 4);
        Ok(())
    });
}

/// A module that was built once, outside of the ranks.
#[test]
fn clones_get_their_own_running_states() {
    let model = ready(|| Normed::new(&device()));
    let seen = launch(LaunchConfig::new(2), move |world| {
        let device = device();
        let model = fully_shard(model.clone(), &line(&world)?, ShardPolicy::new())?;
        for step in 0..3 {
            let loss = model.forward(input([8, 4], world.rank(), step, &device));
            backward(loss.powf_scalar(2.0).mean(), &model)?;
        }
        Ok::<_, Error>(values(model.norm.running_mean.value_sync()))
    });
    let seen = seen.unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(seen[0], seen[1], "each rank has seen other rows");
}

/// Ranks that share a leaf would wait for each other's backward.
#[test]
fn ignored_lazy_parts_belong_to_each_rank() {
    #[derive(Module, Debug)]
    struct Net {
        inner: Linear,
        head: Linear,
    }
    let device = device();
    let model = Net {
        inner: LinearConfig::new(4, 5).init(&device),
        head: LinearConfig::new(5, 3).init(&device),
    };
    let config = LaunchConfig::new(2).deadline(std::time::Duration::from_secs(20));
    let done = launch(config, move |world| {
        let policy = ShardPolicy::new().ignore(["head"]);
        let model = fully_shard(model.clone(), &line(&world)?, policy)?;
        for step in 0..3 {
            let x = model
                .inner
                .forward(input([2, 4], world.rank(), step, &device));
            let gradients = backward(model.head.forward(x).sum(), &model)?;
            assert_eq!(params_with_gradient(&model, &gradients).len(), 4);
        }
        Ok::<_, Error>(())
    });
    done.unwrap_or_else(|error| panic!("{error}"));
}

/// Only children are sharded; the other parts come from outside of the ranks.
#[test]
fn a_plain_part_that_ranks_share_is_named() {
    #[derive(Module, Debug)]
    struct Net {
        inner: Linear,
        head: Linear,
    }
    let device = device();
    let model = ready(|| Net {
        inner: LinearConfig::new(4, 5).init(&device),
        head: LinearConfig::new(5, 3).init(&device),
    });
    let config = LaunchConfig::new(2).deadline(std::time::Duration::from_secs(20));
    let failed = launch(config, move |world| {
        let mut model = model.clone();
        model.inner = fully_shard(model.inner, &line(&world)?, ShardPolicy::new())?;
        for step in 0..3 {
            let x = input([2, 4], world.rank(), step, &device);
            let loss = catch(|| model.head.forward(model.inner.forward(x)).sum())?;
            backward(loss, &model)?;
        }
        Ok::<_, Error>(())
    });
    let message = failed.expect_err("shared").to_string();
    assert!(message.contains("share parameter `head."), "{message}");
    assert!(message.contains("`Module::fork`"), "{message}");
}
