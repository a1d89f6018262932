//! The audit of gradients: right steps are never rejected, whatever the policy, and each of them is checked.
//!
//! Miniature engines in the crate itself show that wrong steps are rejected.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use burn::module::{Lora, Module};
use burn::optim::GradientsAccumulator;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Audit, DivideFactors, Error, Precision, ReduceGroup, ShardPolicy, Strategy, backward, catch,
    fully_shard, no_sync, num_audited, recompute, replicate, units,
};

use super::bench::{build, device, on_ranks, optimizer, seeded_by_rank};
use super::nets::{Block, MLP, Mlp, RECURRENT, tokens};

fn blocks() -> ShardPolicy {
    ShardPolicy::new()
        .units(["blocks.*"])
        .audit(Audit::EveryStep)
}

/// Runs three steps, and additional backwards if `steps` makes them. Each must be audited.
fn audited<M: Module + 'static>(
    ranks: usize,
    build: impl Fn(&ProcessGroup) -> Result<M, Error> + Send + Sync + 'static,
    step: impl Fn(&M, usize, usize, &Device) -> Result<u64, Error> + Send + Sync + 'static,
) {
    on_ranks(ranks, move |world| {
        let model = build(&world)?;
        let mut backwards = 0;
        for number in 0..3 {
            backwards += step(&model, world.rank(), number, &device())?;
        }
        assert_eq!(num_audited(&model)?, backwards);
        Ok(())
    });
}

/// One backward, of the usual loss.
fn plain_step(model: &Mlp, rank: usize, step: usize, device: &Device) -> Result<u64, Error> {
    backward(model.loss(rank, step, device), model)?;
    Ok(1)
}

fn mlp(policy: ShardPolicy) -> impl Fn(&ProcessGroup) -> Result<Mlp, Error> + Send + Sync {
    move |world| build(MLP, world, &device(), policy.clone())
}

fn hybrid(policy: ShardPolicy) -> impl Fn(&ProcessGroup) -> Result<Mlp, Error> + Send + Sync {
    move |world| {
        let mesh = Mesh::new([("replicate", 2), ("shard", world.size() / 2)])?;
        let mesh = ProcessMesh::new(world, mesh)?;
        let model = seeded_by_rank(Mlp::new(&device()), world.rank());
        fully_shard(model, &mesh, policy.clone().replicate_axis("replicate"))
    }
}

#[test]
fn every_policy_is_right_on_any_number_of_ranks() {
    for ranks in 1..=4 {
        let policies = [
            blocks(),
            blocks().strategy(Strategy::ShardGradOp),
            blocks().strategy(Strategy::NoShard),
            blocks().prefetch(3).reshard_root(true),
            blocks().whole_below(106),
            blocks().one_owner(["**"]),
            blocks().one_owner(["blocks.*"]).whole_below(106),
            blocks().lora(Lora::new(2, 3.0)),
            blocks().divide_factors(DivideFactors::balanced(ranks)),
            blocks().divide_factors(DivideFactors {
                pre: 1.5,
                post: 7.0,
            }),
            blocks().gradient_hook(|_, gradient| gradient * 0.25),
            blocks().offload_to(Device::flex()),
            blocks().precision(Precision::default().reduce(FloatDType::BF16)),
            blocks().reduce_group(ReduceGroup::Own).prefetch(1),
            ShardPolicy::new().audit(Audit::EveryStep),
        ];
        for policy in policies {
            audited(ranks, mlp(policy), plain_step);
        }
        audited(
            ranks,
            move |world| {
                build(
                    RECURRENT,
                    world,
                    &device(),
                    ShardPolicy::new()
                        .units(["layers.*"])
                        .audit(Audit::EveryStep),
                )
            },
            |model, rank, step, device| {
                backward(model.loss(rank, step, device), model)?;
                Ok(1)
            },
        );
    }
}

#[test]
fn hybrid_sharding_and_replication_are_right() {
    for ranks in [2, 4] {
        audited(ranks, hybrid(blocks()), plain_step);
        audited(
            ranks,
            hybrid(blocks().strategy(Strategy::NoShard)),
            plain_step,
        );
        audited(
            ranks,
            hybrid(blocks().divide_factors(DivideFactors::balanced(ranks))),
            plain_step,
        );
        audited(
            ranks,
            hybrid(blocks().one_owner(["blocks.*"]).prefetch(2)),
            plain_step,
        );
        let replicated = |world: &ProcessGroup| {
            let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
            replicate(
                seeded_by_rank(Mlp::new(&device()), world.rank()),
                &mesh,
                blocks(),
            )
        };
        audited(ranks, replicated, plain_step);
    }
    audited(4, mlp(blocks().reshard_after_forward_to(2)), plain_step);
}

/// Gradients that wait: whole on each rank, or on the shards.
#[test]
fn deferred_gradients_are_in_the_sum_of_a_later_step() {
    let held = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        for micro in 0..step {
            no_sync(model, || plain_step(model, rank, micro, device))??;
        }
        // The last step need not use the same units as the others.
        if step == 2 {
            let input = model.embed.forward(tokens([2, 4], 11, rank, step, device));
            let loss = model.blocks[1].forward(input).mean();
            backward(loss, model)?;
            return Ok(3);
        }
        plain_step(model, rank, step, device)?;
        Ok(step as u64 + 1)
    };
    for ranks in 1..=4 {
        audited(ranks, mlp(blocks()), held);
        audited(ranks, mlp(blocks().strategy(Strategy::NoShard)), held);
        audited(ranks, mlp(blocks().one_owner(["**"])), held);
    }
    let crossing = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        let mut backwards = 0;
        for crosses in [false, false, true] {
            for handle in units(model)? {
                handle.set_requires_all_reduce(crosses)?;
            }
            backwards += plain_step(model, rank, step, device)?;
        }
        no_sync(model, || plain_step(model, rank, step, device))??;
        backwards += plain_step(model, rank, step, device)?;
        Ok(backwards + 1)
    };
    audited(2, hybrid(blocks()), crossing);
    audited(4, hybrid(blocks()), crossing);
}

/// Some units reduce and others do not; then all do.
#[test]
fn units_may_be_switched_one_by_one() {
    let switched = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        let handles = units(model)?;
        for (index, handle) in handles.iter().enumerate() {
            handle.set_requires_gradient_sync(index % 2 == step % 2)?;
        }
        plain_step(model, rank, step, device)?;
        for handle in &handles {
            handle.set_requires_gradient_sync(true)?;
        }
        plain_step(model, rank, step, device)?;
        Ok(2)
    };
    for ranks in 1..=3 {
        audited(ranks, mlp(blocks()), switched);
    }
}

#[test]
fn frozen_and_unused_parameters_are_not_missed() {
    let frozen = |world: &ProcessGroup| {
        let mut model = build(MLP, world, &device(), blocks().whole_below(16))?;
        model.embed = model.embed.freeze();
        model.blocks[1].up = model.blocks[1].up.clone().freeze();
        Ok(model)
    };
    // Each rank uses other blocks, the last one none at all.
    let routed = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
        if rank == 3 {
            backward(Tensor::<1>::ones([1], device).require_grad() * 0.5, model)?;
            return Ok(1);
        }
        for block in model.blocks.iter().skip(rank) {
            x = block.forward(x);
        }
        backward(model.head.forward(x).powf_scalar(2.0).mean(), model)?;
        Ok(1)
    };
    for ranks in 1..=4 {
        audited(ranks, frozen, plain_step);
        audited(ranks, mlp(blocks()), routed);
        audited(
            ranks,
            mlp(blocks().strategy(Strategy::NoShard).prefetch(2)),
            routed,
        );
    }
    audited(4, hybrid(blocks()), routed);
}

/// The gradients held back for a parameter that is frozen before the next reduction never come, on purpose.
#[test]
fn gradients_frozen_while_deferred_are_dropped() {
    on_ranks(2, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        for step in 0..2 {
            no_sync(&model, || plain_step(&model, world.rank(), step, &device))??;
            model.blocks[step].down = model.blocks[step].down.clone().freeze();
            plain_step(&model, world.rank(), step, &device)?;
        }
        assert_eq!(num_audited(&model)?, 4);
        Ok(())
    });
}

#[test]
fn units_and_passes_may_repeat() {
    let several = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        // Two forwards in one loss, the second with a block twice.
        let first = model.loss(rank, step, device);
        let x = model
            .embed
            .forward(tokens([2, 4], 11, rank, step + 1, device));
        let x = model.blocks[0].forward(model.blocks[2].forward(model.blocks[0].forward(x)));
        backward(first + model.head.forward(x).mean(), model)?;
        // Two forwards, then their backwards.
        let losses = [0, 1].map(|micro| model.loss(rank + micro, step, device));
        for loss in losses {
            backward(loss, model)?;
        }
        Ok(3)
    };
    let recomputed = |model: &Mlp, rank: usize, step: usize, device: &Device| {
        let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
        for block in &model.blocks {
            x = recompute(block, x, |block: &Block, x| block.forward(x));
        }
        backward(model.head.forward(x).mean(), model)?;
        Ok(1)
    };
    for ranks in 1..=3 {
        for policy in [
            blocks(),
            blocks().strategy(Strategy::NoShard),
            blocks().lora(Lora::new(2, 3.0)),
        ] {
            audited(ranks, mlp(policy.clone()), several);
            audited(ranks, mlp(policy), recomputed);
        }
    }
    audited(4, hybrid(blocks()), several);
    audited(4, hybrid(blocks()), recomputed);
}

/// Clones with separate gradients, in one loss.
#[test]
fn copies_of_a_module_are_added_up() {
    audited(2, mlp(blocks()), |model, rank, step, device| {
        let clone = model.clone();
        let loss = model.loss(rank, step, device) + clone.loss(rank, step + 1, device);
        backward(loss, model)?;
        Ok(1)
    });
}

/// After an error in the middle of a backward, on all ranks, all gradients until then are gone, and not missed
/// afterwards.
#[test]
fn an_error_leaves_nothing_behind() {
    on_ranks(2, |world| {
        let device = device();
        let fails = Arc::new(AtomicBool::new(false));
        let asked = fails.clone();
        let hook = move |path: &str, gradient: Tensor<1>| {
            let fails = path.contains("blocks.1.up") && asked.swap(false, Relaxed);
            // The length differs from the given gradient's.
            if fails {
                gradient.narrow(0, 0, 1)
            } else {
                gradient
            }
        };
        let model = build(MLP, &world, &device, blocks().gradient_hook(hook))?;
        for step in 0..4 {
            no_sync(&model, || plain_step(&model, world.rank(), step, &device))??;
            fails.store(step == 1, Relaxed);
            let result = plain_step(&model, world.rank(), step, &device);
            assert_eq!(matches!(result, Err(Error::Hook { .. })), step == 1);
        }
        assert_eq!(num_audited(&model)?, 7);
        Ok(())
    });
}

/// Parameters change between steps, and gradients of several backwards make one step.
#[test]
fn optimizers_step_in_between() {
    on_ranks(2, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = optimizer();
        for step in 0..3 {
            let mut whole = GradientsAccumulator::new();
            for micro in 0..2 {
                let loss = catch(|| model.loss(world.rank(), step * 2 + micro, &device))?;
                whole.accumulate(&model, backward(loss, &model)?);
            }
            model = optim.step(1e-2, model, whole.grads());
        }
        assert_eq!(num_audited(&model)?, 6);
        Ok(())
    });
}

/// Steps are audited only if requested, and a new order is audited at once.
#[test]
fn orders_are_audited_when_they_are_new() {
    let number = |audit: Audit, changes: bool| {
        let numbers = on_ranks(2, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, blocks().audit(audit))?;
            let mut numbers = Vec::new();
            for step in 0..6 {
                let skips = usize::from(changes && step < 3);
                let mut x = model
                    .embed
                    .forward(tokens([2, 4], 11, world.rank(), step, &device));
                for block in model.blocks.iter().skip(skips) {
                    x = block.forward(x);
                }
                backward(model.head.forward(x).mean(), &model)?;
                numbers.push(num_audited(&model)?);
            }
            Ok(numbers)
        });
        assert_eq!(numbers[0], numbers[1]);
        numbers[0].clone()
    };
    assert_eq!(number(Audit::Off, true), [0; 6]);
    assert_eq!(number(Audit::EveryStep, false), [1, 2, 3, 4, 5, 6]);
    // The first, and the first that follows its record.
    assert_eq!(number(Audit::NewOrders, false), [1, 2, 2, 2, 2, 2]);
    // In the fourth step an operation is missing; the fifth follows the extended order.
    assert_eq!(number(Audit::NewOrders, true), [1, 2, 2, 2, 3, 3]);
}

#[test]
fn an_audited_step_issues_no_operation_more() {
    let counts = |audit: Audit, policy: ShardPolicy| {
        on_ranks(3, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone().audit(audit))?;
            let mut counts = Vec::new();
            for step in 0..4 {
                let before = world.counts();
                backward(model.loss(world.rank(), step, &device), &model)?;
                counts.push(world.counts().since(&before));
            }
            Ok(counts)
        })
    };
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
        let policy = blocks().strategy(strategy);
        let off = counts(Audit::Off, policy.clone());
        assert_eq!(
            counts(Audit::EveryStep, policy.clone()),
            off,
            "what is kept whole carries the notes"
        );
        assert_eq!(counts(Audit::NewOrders, policy), off);
    }
    // Nothing is kept whole: the note of the last exchange is longer, in the steps that are audited.
    let policy = blocks().strategy(Strategy::NoShard);
    let off = counts(Audit::Off, policy.clone());
    let on = counts(Audit::NewOrders, policy);
    for (on, off) in on.iter().zip(&off) {
        let operations = |counts: &[burn_fsdp_collectives::OperationCounts]| -> Vec<u64> {
            counts
                .iter()
                .map(|counts| counts.total().operations)
                .collect()
        };
        assert_eq!(operations(on), operations(off));
        assert_eq!(on[2..], off[2..], "bytes too, from the third on");
        assert!(on[1].total().bytes > off[1].total().bytes);
    }
}

/// A child that is sharded over fewer ranks than its parent would be averaged only over these.
#[test]
fn children_without_the_replicas_of_their_parent_are_refused() {
    on_ranks(4, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let mut model = Mlp::new(&device());
        let child = model.blocks.remove(0);
        model
            .blocks
            .push(fully_shard(child, &mesh, ShardPolicy::new())?);
        let refused = fully_shard(model, &mesh, blocks().replicate_axis("replicate"));
        let message = refused.err().map(|error| error.to_string());
        let message = message.unwrap_or_default();
        assert!(message.contains("replicated over"), "{message}");
        Ok(())
    });
}
