//! Forwards without a backward, maps of parts of a module, values of other steps, mixed types.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, Norm, Precision, ShardPolicy, Strategy, backward, catch, fully_shard, grad_norm,
    no_sync, order,
};

use super::bench::{
    Case, SEED, assert_close, build, device, on_ranks, optimizer, panic_of, params, plainly, ready,
    seeded, sharded, whole_params,
};
use super::nets::{Block, MLP, Mlp, input};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Gathers of a step after `forwards` tracked forwards without a backward, by step.
fn gathers_after(forwards: usize, only_rank: Option<usize>) -> Vec<u64> {
    let mut of_ranks = on_ranks(2, move |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = SgdConfig::new().init();
        let mut numbers = Vec::new();
        for step in 0..6 {
            let runs = only_rank.is_none_or(|rank| rank == world.rank());
            if step == 2 && runs {
                (0..forwards).for_each(|_| drop(model.loss(world.rank(), 0, &device)));
            }
            let before = world.counts();
            let gradients = backward(model.loss(world.rank(), step, &device), &model)?;
            model = optim.step(1e-3, model, gradients);
            let counts = world.counts().since(&before);
            numbers.push(counts.of(OperationKind::AllGather).operations);
        }
        Ok(numbers)
    });
    of_ranks.swap_remove(0)
}

#[test]
fn forwards_without_backward_do_not_lengthen_the_order() {
    let regular = gathers_after(0, None);
    let after = gathers_after(50, None);
    // At most one more forward is kept in the order, for a while.
    assert!(after[5] <= regular[5] + 4, "{after:?}, usually {regular:?}");
    let on_one_rank = gathers_after(3, Some(1));
    assert!(on_one_rank[5] <= regular[5] + 6, "{on_one_rank:?}");
}

/// Freezes and unfreezes parts of the module, and uses parts that were not expected.
fn with_parts_mapped(strategy: Strategy) {
    let steps = 8;
    let route = |rank: usize, step: usize| match (rank + step) % 2 {
        0 => vec![0, 1, 2],
        _ => vec![2, 0],
    };
    let loss = move |model: &Mlp, rank: usize, step: usize, device: &Device| {
        let mut x = input([2, 4, 15], rank, step, device);
        for block in route(rank, step) {
            x = model.blocks[block].forward(x);
        }
        let x = model.norm.forward(x);
        model.head.forward(x).powf_scalar(2.0).mean()
    };
    let staged = |mut model: Mlp, step: usize| {
        match step {
            2 => model.blocks = model.blocks.freeze(),
            4 => model.head = model.head.freeze(),
            5 => model.blocks = model.blocks.unfreeze(),
            6 => model.head = model.head.unfreeze(),
            _ => {}
        }
        model
    };
    let want = {
        let device = Device::flex().autodiff();
        let mut model = seeded(Mlp::new(&device), SEED);
        let mut optim = optimizer();
        for step in 0..steps {
            model = staged(model, step);
            let sum = loss(&model, 0, step, &device) + loss(&model, 1, step, &device);
            let again = loss(&model, 0, step + 1, &device) + loss(&model, 1, step + 1, &device);
            let mean = (sum + again).div_scalar(2.0);
            let gradients = GradientsParams::from_grads(mean.backward(), &model);
            model = optim.step(1e-2, model, gradients);
        }
        params(&model)
    };
    let got = on_ranks(2, move |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks().strategy(strategy))?;
        let mut optim = optimizer();
        for step in 0..steps {
            model = staged(model, step);
            let of = |step| catch(|| loss(&model, world.rank(), step, &device));
            no_sync(&model, || backward(of(step)?, &model))??;
            let gradients = backward(of(step + 1)?, &model)?;
            model = optim.step(1e-2, model, gradients);
            if step == 3 {
                // A copy of another age next to the one in use.
                drop(model.clone().freeze());
            }
        }
        Ok(whole_params(Mlp::new(&device), &model))
    });
    for got in got {
        for ((path, got), (_, want)) in got.iter().zip(&want) {
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-5, "{path}: {got}, expected {want}");
            }
        }
    }
}

#[test]
fn parts_may_be_frozen_and_unfrozen_while_routes_differ() {
    with_parts_mapped(Strategy::FullShard);
    with_parts_mapped(Strategy::ShardGradOp);
    with_parts_mapped(Strategy::NoShard);
}

/// One unit, with a part that is mapped: its parameters have two ages.
#[test]
fn a_part_of_a_unit_may_be_mapped() {
    let frozen = |device: &Device| {
        let mut model = Mlp::new(device);
        model.head = model.head.freeze();
        model
    };
    let want = plainly(
        Case {
            build: frozen,
            loss: Mlp::loss,
        },
        2,
        5,
    );
    let got = on_ranks(2, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, ShardPolicy::new())?;
        model.head = model.head.freeze();
        let mut optim = optimizer();
        let mut gathers = 0;
        for step in 0..5 {
            let before = world.counts();
            let gradients = backward(model.loss(world.rank(), step, &device), &model)?;
            gathers = world
                .counts()
                .since(&before)
                .of(OperationKind::AllGather)
                .operations;
            model = optim.step(1e-2, model, gradients);
        }
        Ok((gathers, whole_params(Mlp::new(&device), &model)))
    });
    for (gathers, got) in got {
        assert_eq!(gathers, 1, "one unit is gathered at once");
        for ((path, got), (_, want)) in got.iter().zip(&want.params) {
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-5, "{path}: {got}, expected {want}");
            }
        }
    }
}

#[test]
fn a_skipped_optimizer_step_is_reported() {
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        let message = panic_of(|| {
            on_ranks(2, move |world| {
                let device = device();
                let mut model = build(MLP, &world, &device, blocks().strategy(strategy))?;
                let mut optim = optimizer();
                for step in 0..3 {
                    let gradients =
                        backward(catch(|| model.loss(world.rank(), step, &device))?, &model)?;
                    if step != 1 || world.rank() == 0 {
                        model = optim.step(1e-2, model, gradients);
                    }
                }
                Ok(())
            })
        });
        assert!(message.contains("values"), "{message}");
    }
}

#[test]
fn units_keep_their_names_after_one_is_gone() {
    on_ranks(2, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = optimizer();
        for step in 0..4 {
            let gradients = backward(model.loss(world.rank(), step, &device), &model)?;
            model = optim.step(1e-2, model, gradients);
            if step == 1 {
                drop(model.blocks.remove(1));
            }
        }
        let order = order(&model)?.to_string();
        assert!(order.contains("reduce blocks.2"), "{order}");
        assert!(
            !order.contains("blocks.1") && !order.contains('?'),
            "{order}"
        );
        Ok(())
    });
}

/// A layer that is used twice, for gradients held back in one type and added in another.
#[derive(Module, Debug)]
struct Twice {
    layers: Vec<Linear>,
    head: Linear,
}

#[test]
fn deferred_gradients_are_summed_in_one_type() {
    on_ranks(2, |world| {
        let device = device();
        let model = ready(|| Twice {
            layers: (0..2)
                .map(|_| LinearConfig::new(5, 5).init(&device))
                .collect(),
            head: LinearConfig::new(5, 3).init(&device),
        });
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
        let policy = ShardPolicy::new().units(["layers.*"]).precision(precision);
        let model = fully_shard(model, &mesh, policy)?;
        let loss = || {
            catch(|| {
                let mut x = input([2, 5], world.rank(), 0, &device).cast(FloatDType::BF16);
                for layer in [0, 1, 0] {
                    x = model.layers[layer].forward(x);
                }
                model.head.forward(x).powf_scalar(2.0).mean()
            })
        };
        let alone = backward(loss()?, &model)?;
        no_sync(&model, || backward(loss()?, &model))??;
        let both = backward(loss()?, &model)?;
        let before = grad_norm(&model, &alone, Norm::P(2.0))?;
        let after = grad_norm(&model, &both, Norm::P(2.0))?;
        assert!(
            (after - 2.0 * before).abs() < 1e-3 * after,
            "{after}, {before}"
        );
        Ok(())
    });
}

/// Makes every float parameter bf16.
struct Half;

impl ModuleMapper for Half {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let strategy = tensor.device().gradient_checkpointing_strategy();
            let tensor = tensor.inner().cast(FloatDType::BF16).autodiff();
            match strategy {
                Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
                None => tensor,
            }
            .require_grad()
        })
    }
}

/// Weights of two element types in one unit, and gradients that travel in the wider of them.
#[test]
fn a_unit_of_two_types_is_reduced_in_the_wider_one() {
    let built = |device: &Device| {
        let mut block = Mlp::block(device);
        block.up = block.up.map(&mut Half);
        block
    };
    let loss = |block: &Block, device: &Device| {
        let x = input([2, 4, 15], 0, 0, device);
        let up = block.up.forward(x.clone().cast(FloatDType::BF16));
        let product = up.cast(FloatDType::F32) * block.gate.forward(block.norm.forward(x));
        block.down.forward(product).powf_scalar(2.0).sum()
    };
    let ranks = 2;
    let start = ready(|| built(&Device::flex().autodiff()));
    let want = {
        let device = Device::flex().autodiff();
        let gradients = loss(&start, &device).backward();
        let gradients = GradientsParams::from_grads(gradients, &start);
        params(&SgdConfig::new().init().step(1e-1, start.clone(), gradients))
    };
    let record = start.into_record();
    let got = on_ranks(ranks, move |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", ranks)?)?;
        let precision = Precision::default().reduce(FloatDType::F32);
        let block = ready(|| built(&device)).load_record(record.clone());
        let block = fully_shard(block, &mesh, ShardPolicy::new().precision(precision))?;
        let gradients = backward(catch(|| loss(&block, &device))?, &block)?;
        let block = SgdConfig::new().init().step(1e-1, block, gradients);
        Ok(whole_params(built(&device), &block))
    });
    for ((path, got), (_, want)) in got[0].iter().zip(&want) {
        // One unit in the last place of bf16.
        let tolerance = if path.starts_with("up") { 8e-3 } else { 1e-5 };
        for (got, want) in got.iter().zip(want) {
            let bound = tolerance * want.abs().max(1.0);
            assert!(
                (got - want).abs() <= bound,
                "{path}: {got}, expected {want}"
            );
        }
    }
}

#[test]
fn a_consumed_graph_is_an_error_that_names_the_cause() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, ShardPolicy::new())?;
        let first = model.loss(world.rank(), 0, &device);
        let second = model.loss(world.rank(), 1, &device);
        backward(first, &model)?;
        let error = backward(second, &model).expect_err("consumed");
        assert!(matches!(error, Error::Consumed), "{error}");

        // With several units, if the two begin with different parameters.
        let model = build(MLP, &world, &device, blocks())?;
        let first = model.loss(world.rank(), 0, &device);
        let x = input([2, 4, 15], world.rank(), 1, &device);
        let second = model.blocks[1].forward(x).powf_scalar(2.0).mean();
        backward(first, &model)?;
        let error = backward(second, &model).expect_err("consumed");
        assert!(matches!(error, Error::Consumed), "{error}");
        Ok(())
    });
}

#[test]
fn two_forwards_in_one_loss_agree() {
    let twice = Case {
        build: Mlp::new,
        loss: |model: &Mlp, rank, step, device| {
            model.loss(rank, step, device) + model.loss(rank, step + 1, device)
        },
    };
    for ranks in 1..=3 {
        let got = sharded(twice, ranks, 4, blocks());
        assert_close(&got, &plainly(twice, ranks, 4), 1e-5);
    }
}
