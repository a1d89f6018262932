//! Regions whose activations are recomputed.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{OperationCounts, OperationKind};
use burn_fsdp_shard::{ShardPolicy, Strategy, UnitState, backward, catch, recompute, units};

use super::bench::{Case, assert_close, build, device, on_ranks, plainly, sharded};
use super::nets::{Block, MLP, Mlp, RECURRENT, Recurrent, input, tokens};

fn square<const D: usize>(output: Tensor<D>) -> Tensor<1> {
    output.powf_scalar(2.0).mean()
}

/// A region around each unit.
pub(crate) fn around_units(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        x = recompute(block, x, |block: &Block, x| block.forward(x));
    }
    square(model.head.forward(model.norm.forward(x)))
}

/// A region inside each unit: some of its parameters are used outside of it.
pub(crate) fn inside_units(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        let y = block.norm.forward(x.clone());
        let y = recompute(block, y, |block: &Block, y| {
            gelu(block.up.forward(y.clone())) * block.gate.forward(y)
        });
        x = x + block.down.forward(y);
    }
    square(model.head.forward(model.norm.forward(x)))
}

/// One region around everything but the tokens.
pub(crate) fn around_all(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    recompute(model, x, |model: &Mlp, x| {
        let mut x = x;
        for block in &model.blocks {
            x = block.forward(x);
        }
        square(model.head.forward(model.norm.forward(x)))
    })
}

pub(crate) fn recurrent(model: &Recurrent, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = input([2, 6, 5], rank, step, device);
    for layer in &model.layers {
        x = recompute(layer, x, |layer: &burn::nn::Lstm, x| {
            layer.forward(x, None).0
        });
    }
    square(model.head.forward(x))
}

fn agrees<M: Module + 'static>(
    case: Case<M>,
    loss: fn(&M, usize, usize, &Device) -> Tensor<1>,
    policy: &ShardPolicy,
) {
    let again = Case { loss, ..case };
    for ranks in 1..=4 {
        let want = plainly(case, ranks, 10);
        assert_close(&plainly(again, ranks, 10), &want, 1e-5);
        assert_close(&sharded(again, ranks, 10, policy.clone()), &want, 1e-5);
    }
}

#[test]
fn regions_change_nothing() {
    let blocks = ShardPolicy::new().units(["blocks.*"]);
    agrees(MLP, around_units, &blocks);
    agrees(MLP, inside_units, &blocks);
    agrees(MLP, around_all, &blocks);
    agrees(MLP, around_units, &ShardPolicy::new());
    agrees(
        MLP,
        around_units,
        &blocks.clone().strategy(Strategy::ShardGradOp),
    );
    agrees(
        MLP,
        around_units,
        &blocks.clone().strategy(Strategy::NoShard),
    );
    agrees(MLP, around_units, &blocks.prefetch(0));
    agrees(
        RECURRENT,
        recurrent,
        &ShardPolicy::new().units(["layers.*"]),
    );
}

/// Counts of the third step, on every rank.
fn of_one_step(
    loss: fn(&Mlp, usize, usize, &Device) -> Tensor<1>,
    prefetch: usize,
) -> Vec<OperationCounts> {
    on_ranks(3, move |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]).prefetch(prefetch);
        let model = build(MLP, &world, &device, policy)?;
        let mut since = world.counts();
        for step in 0..3 {
            let before = world.counts();
            backward(loss(&model, world.rank(), step, &device), &model)?;
            since = world.counts().since(&before);
            assert!(
                units(&model)?
                    .iter()
                    .all(|unit| unit.state() == UnitState::Sharded)
            );
        }
        Ok(since)
    })
}

/// A region around a unit costs no additional gather.
#[test]
fn regions_add_no_gathers() {
    for prefetch in 0..3 {
        for counts in of_one_step(around_units, prefetch) {
            assert_eq!(counts.of(OperationKind::AllGather).operations, 7);
            assert_eq!(counts.of(OperationKind::ReduceScatter).operations, 4);
            assert_eq!(counts.of(OperationKind::AllReduce).operations, 1);
        }
    }
}

/// Each block is gathered five times instead of twice, next to the root's one gather.
#[test]
fn a_region_inside_a_unit_is_gathered_for_separately() {
    for counts in of_one_step(inside_units, 0) {
        let gathers = counts.of(OperationKind::AllGather).operations;
        assert_eq!(gathers, 1 + 3 * 5);
    }
}

#[derive(Module, Debug)]
struct Dropping {
    linear: Linear,
    dropout: Dropout,
}

#[test]
fn random_numbers_and_captured_tensors_are_errors() {
    let device = device();
    let model = Dropping {
        linear: LinearConfig::new(32, 32).init(&device),
        dropout: DropoutConfig::new(0.5).init(),
    };
    let x = Tensor::<2>::ones([8, 32], &device);
    // Ranks that are threads share Burn's generator.
    let said = on_ranks(2, |_| {
        let device = super::bench::device();
        let model = Dropping {
            linear: LinearConfig::new(32, 32).init(&device),
            dropout: DropoutConfig::new(0.5).init(),
        };
        let x = Tensor::<2>::ones([8, 32], &device);
        let loss = recompute(&model, x, |model: &Dropping, x| {
            model.dropout.forward(model.linear.forward(x))
        });
        Ok(catch(|| loss.sum().backward()).err().map(|e| e.to_string()))
    });
    for message in said.into_iter().map(Option::unwrap_or_default) {
        assert!(message.contains("make regions deterministic"), "{message}");
    }

    let other = model.linear.weight.val();
    let captured = catch(|| {
        recompute(&model, x, move |model: &Dropping, x| {
            relu(model.linear.forward(x)).matmul(other.clone())
        })
    });
    let message = captured.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(
        message.contains("captures a tensor with a graph"),
        "{message}"
    );
}

/// A parameter that is used both inside and outside a region has both gradients.
#[test]
fn plain_parameters_may_be_shared_with_the_outside() {
    let device = device();
    let linear: Linear = LinearConfig::new(5, 5).init(&device);
    let x = Tensor::<2>::ones([3, 5], &device);
    let gradient = |loss: Tensor<1>| {
        let gradients = GradientsParams::from_grads(loss.backward(), &linear);
        gradients
            .get::<2>(linear.weight.id)
            .expect("used")
            .into_data()
    };
    let want = gradient(square(linear.forward(relu(linear.forward(x.clone())))));
    let hidden = recompute(&linear, x, |linear: &Linear, x| relu(linear.forward(x)));
    let got = gradient(square(linear.forward(hidden)));
    got.assert_approx_eq::<f32>(&want, burn::tensor::Tolerance::relative(1e-6));
}
