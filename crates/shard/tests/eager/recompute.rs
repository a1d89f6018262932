//! Regions whose activations are recomputed.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{OperationCounts, OperationKind};
use burn_fsdp_shard::{
    ShardPolicy, Strategy, UnitHandle, UnitState, backward, catch, recompute, units,
};

use super::bench::{Case, assert_close, build, device, on_ranks, optimizer, plainly, sharded};
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

/// A way to run the blocks of [`Mlp`].
type Blocks = fn(&[Block], Tensor<3>) -> Tensor<3>;

fn loss_of(blocks: Blocks, model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    let x = blocks(&model.blocks, x);
    square(model.head.forward(model.norm.forward(x)))
}

/// The parts of a block around its products: before, between and after them.
fn before(block: &Block, x: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    (x.clone(), block.norm.forward(x))
}

fn between(block: &Block, (x, y): (Tensor<3>, Tensor<3>)) -> (Tensor<3>, Tensor<3>) {
    let y = gelu(block.up.forward(y.clone())) * block.gate.forward(y);
    (x, y)
}

fn after(block: &Block, (x, y): (Tensor<3>, Tensor<3>)) -> Tensor<3> {
    x + block.down.forward(y)
}

fn each(blocks: &[Block], x: Tensor<3>, run: fn(&Block, Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    blocks.iter().fold(x, |x, block| run(block, x))
}

/// Regions that share their unit with other code: in the middle, at the start, at the end, two of them with code
/// between, two without other code, three, two that read the same parameters, and one from the middle of a unit to the
/// middle of the next.
const SHARED: [(&str, Blocks); 8] = [
    ("middle", |blocks, x| {
        each(blocks, x, |block, x| {
            after(block, recompute(block, before(block, x), between))
        })
    }),
    ("start", |blocks, x| {
        each(blocks, x, |block, x| {
            after(block, between(block, recompute(block, x, before)))
        })
    }),
    ("end", |blocks, x| {
        each(blocks, x, |block, x| {
            recompute(block, between(block, before(block, x)), after)
        })
    }),
    ("both ends", |blocks, x| {
        each(blocks, x, |block, x| {
            let middle = between(block, recompute(block, x, before));
            recompute(block, middle, after)
        })
    }),
    ("halves", |blocks, x| {
        each(blocks, x, |block, x| {
            let middle = recompute(block, x, |block: &Block, x| {
                between(block, before(block, x))
            });
            recompute(block, middle, after)
        })
    }),
    ("thirds", |blocks, x| {
        each(blocks, x, |block, x| {
            let middle = recompute(block, recompute(block, x, before), between);
            recompute(block, middle, after)
        })
    }),
    ("twice", |blocks, x| {
        each(blocks, x, |block, x| {
            let x = recompute(block, x, |block: &Block, x| block.forward(x));
            recompute(block, x, |block: &Block, x| block.forward(x)).mul_scalar(0.5)
        })
    }),
    ("across", |blocks, x| {
        // The last region ends in the middle of the last unit.
        let middle = between(&blocks[0], before(&blocks[0], x));
        let pairs = blocks.windows(2);
        let middle = pairs.fold(middle, |middle, pair| {
            recompute(&pair.to_vec(), middle, |pair: &Vec<Block>, middle| {
                between(&pair[1], before(&pair[1], after(&pair[0], middle)))
            })
        });
        after(&blocks[blocks.len() - 1], middle)
    }),
];

/// The same computation as "twice", without regions.
fn twice(blocks: &[Block], x: Tensor<3>) -> Tensor<3> {
    each(blocks, x, |block, x| {
        block.forward(block.forward(x)).mul_scalar(0.5)
    })
}

/// The kinds of operations of a step, with their numbers, and the loss of each step.
type Seen = (Vec<u64>, Vec<f32>);

/// The operations of the third step, on each rank.
fn seen(blocks: Blocks, ranks: usize, policy: &ShardPolicy) -> Vec<Seen> {
    let policy = policy.clone();
    on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, policy.clone())?;
        let mut optim = optimizer();
        let (mut operations, mut losses) = (Vec::new(), Vec::new());
        for step in 0..3 {
            let before = world.counts();
            let loss = loss_of(blocks, &model, world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            let since = world.counts().since(&before);
            operations = OperationKind::ALL
                .map(|kind| since.of(kind).operations)
                .to_vec();
            let units = units(&model)?;
            let is_sharded = |unit: &UnitHandle| unit.state() == UnitState::Sharded;
            assert!(units.iter().all(is_sharded));
            model = optim.step(1e-2, model, gradients);
        }
        Ok((operations, losses))
    })
}

/// A step gathers and reduces as often as without regions, wherever regions begin and end, and computes the same.
#[test]
fn regions_share_the_gathers_of_their_unit() {
    let blocks = ShardPolicy::new().units(["blocks.*"]);
    let policies = [
        blocks.clone().prefetch(0),
        blocks.clone().prefetch(2),
        blocks.clone().strategy(Strategy::ShardGradOp),
        blocks.strategy(Strategy::NoShard),
        ShardPolicy::new(),
    ];
    for ranks in 1..=4 {
        for (number, policy) in policies.iter().enumerate() {
            let kept: Blocks = |blocks, x| each(blocks, x, Block::forward);
            let plain = [seen(kept, ranks, policy), seen(twice, ranks, policy)];
            for (name, blocks) in SHARED {
                let want = &plain[usize::from(name == "twice")];
                let got = seen(blocks, ranks, policy);
                let what = format!("{name}, {ranks} ranks, policy {number}");
                for ((got, losses), (want, expected)) in got.iter().zip(want) {
                    assert_eq!(got, want, "{what}");
                    for (got, want) in losses.iter().zip(expected) {
                        assert!((got - want).abs() <= 1e-5 * want.abs(), "{what}");
                    }
                }
            }
            if ranks == 3 && number == 0 {
                let gathers = OperationKind::ALL
                    .iter()
                    .position(|kind| *kind == OperationKind::AllGather);
                let gathers = gathers.map(|kind| plain[0][0].0[kind]);
                // The root, and each block in forward and in backward.
                assert_eq!(gathers, Some(1 + 3 * 2));
            }
        }
    }
}

/// Parts of units in regions train as plain Burn does.
#[test]
fn regions_inside_units_change_nothing() {
    fn of<const N: usize>(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        loss_of(SHARED[N].1, model, rank, step, device)
    }
    type Loss = fn(&Mlp, usize, usize, &Device) -> Tensor<1>;
    let losses: [Loss; 7] = [
        of::<0>, of::<1>, of::<2>, of::<3>, of::<4>, of::<5>, of::<7>,
    ];
    let blocks = ShardPolicy::new().units(["blocks.*"]);
    for loss in losses {
        agrees(MLP, loss, &blocks);
    }
    agrees(
        MLP,
        losses[0],
        &blocks.clone().strategy(Strategy::ShardGradOp),
    );
    agrees(MLP, losses[3], &blocks.clone().strategy(Strategy::NoShard));
    agrees(MLP, losses[6], &blocks.prefetch(2));
    agrees(MLP, losses[5], &ShardPolicy::new());
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
        message.contains("captures a tensor with a graph") && message.contains("in a tuple"),
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
