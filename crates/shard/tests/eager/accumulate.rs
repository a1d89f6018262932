//! Gradient accumulation: a step made of micro-batches.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn_fsdp_collectives::{OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Audit, Error, ShardPolicy, Strategy, UnitHandle, UnitMemory, backward, fully_shard, memory,
    no_sync, num_params, units, unused_units,
};

use super::bench::{
    Case, Outcome, assert_close, build, device, joined, on_ranks, optimizer, plainly,
    seeded_by_rank, whole_params,
};
use super::hybrid;
use super::nets::{CONV_NET, MLP, RECURRENT};

const STEPS: usize = 10;
const MICRO: usize = 3;

/// The micro-batches of a step are the batches of correspondingly more ranks.
fn accumulated<M: Module + 'static>(
    case: Case<M>,
    ranks: usize,
    policy: ShardPolicy,
    synced: bool,
) -> Outcome {
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(case, &world, &device, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let micro_batch = |model: &M, micro: usize| {
                let loss = (case.loss)(model, micro * world.size() + world.rank(), step, &device);
                let value = loss.clone().into_scalar::<f32>() / MICRO as f32;
                (value, loss.div_scalar(MICRO as f32))
            };
            let mut value = 0.0;
            let mut accumulator = GradientsAccumulator::new();
            for micro in 0..MICRO {
                let is_last = micro + 1 == MICRO;
                let mut run = || -> Result<GradientsParams, Error> {
                    let (part, loss) = micro_batch(&model, micro);
                    value += part;
                    backward(loss, &model)
                };
                let gradients = if synced || is_last {
                    run()?
                } else {
                    let gradients = no_sync(&model, run)??;
                    assert_eq!(gradients.len(), 0, "nothing for the optimizer yet");
                    gradients
                };
                accumulator.accumulate(&model, gradients);
            }
            losses.push(value);
            model = optim.step(1e-2, model, accumulator.grads());
        }
        Ok(Outcome {
            losses,
            params: whole_params((case.build)(&device), &model),
        })
    });
    joined(&outcomes)
}

fn agrees<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
    for ranks in 1..=4 {
        let want = plainly(case, ranks * MICRO, STEPS);
        for synced in [true, false] {
            let got = accumulated(case, ranks, policy.clone(), synced);
            assert_close(&got, &want, 1e-5);
        }
    }
}

#[test]
fn micro_batches_equal_the_whole_batch() {
    agrees(MLP, &ShardPolicy::new().units(["blocks.*"]));
    agrees(
        MLP,
        &ShardPolicy::new()
            .units(["blocks.*"])
            .strategy(Strategy::ShardGradOp),
    );
    agrees(
        MLP,
        &ShardPolicy::new()
            .units(["blocks.*"])
            .strategy(Strategy::NoShard),
    );
}

#[test]
fn micro_batches_of_other_nets_equal_the_whole_batch() {
    agrees(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
    agrees(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
}

/// By unit: what is held, gathered by hand, and held back.
fn memory_of_units_adds_up<M: Module>(model: &M) -> Result<(), Error> {
    let handles = units(model)?;
    let by_hand = &handles[1];
    by_hand.unshard()?.wait()?;
    let (all, of_units) = (memory(model)?, handles.iter().map(UnitHandle::memory));
    let of_units: Vec<_> = of_units.collect();
    let sum = |of: fn(&UnitMemory) -> usize| of_units.iter().map(of).sum::<usize>();
    assert_eq!(sum(|unit| unit.parameters), all.parameters);
    assert_eq!(sum(|unit| unit.unreduced), all.unreduced);
    assert!(of_units.iter().all(|unit| unit.unreduced > 0));
    let live = all.unsharded_live - all.unreduced;
    assert!(of_units[1].unsharded > 0);
    assert_eq!(sum(|unit| unit.unsharded), live);
    by_hand.reshard()
}

/// What `no_sync` saves in traffic and costs in memory, to the byte.
#[test]
fn traffic_and_memory_are_exact() {
    let seen = on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, ShardPolicy::new().units(["blocks.*"]))?;
        let loss = |step| (MLP.loss)(&model, world.rank(), step, &device);
        for step in 0..2 {
            backward(loss(step), &model)?;
        }
        let before = world.counts();
        no_sync(&model, || backward(loss(2), &model))??;
        let without = world.counts().since(&before);
        let held = memory(&model)?.unreduced;
        memory_of_units_adds_up(&model)?;
        let before = world.counts();
        backward(loss(3), &model)?;
        let with = world.counts().since(&before);
        let after = memory(&model)?.unreduced;
        Ok((without, with, held, after, num_params(&model)))
    });
    for (without, with, held, after, params) in seen {
        let moved =
            |counts: &burn_fsdp_collectives::OperationCounts, kind| counts.of(kind).operations;
        assert_eq!(moved(&without, OperationKind::ReduceScatter), 0);
        assert_eq!(moved(&without, OperationKind::AllReduce), 0);
        assert_eq!(moved(&with, OperationKind::ReduceScatter), 4);
        assert_eq!(moved(&with, OperationKind::AllReduce), 1);
        // Sharded parameters' gradients, whole; parameters that are kept whole anyway cost no additional
        // memory.
        let whole: usize = 3 * (15 + 15 + 7 + 7 + 15 - 7) + 15 + 7;
        println!("no_sync: {held} bytes of gradients held back, for no reduction at all");
        assert_eq!(held, 4 * (params - whole));
        assert_eq!(after, 0);
    }
}

/// Sets whether backwards hand their gradients out.
fn set_last<M: Module>(model: &M, is_last: bool) -> Result<(), Error> {
    let units = units(model)?;
    units
        .iter()
        .try_for_each(|unit| unit.set_is_last_backward(is_last))
}

/// Trains by micro-batches of which the last alone hands gradients out.
fn handed_out_last<M: Module + 'static>(
    case: Case<M>,
    layout: [usize; 2],
    policy: ShardPolicy,
) -> Outcome {
    let outcomes = on_ranks(layout[0] * layout[1], move |world| {
        let device = device();
        let mut model = hybrid::build(case, &world, layout, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let mut value = 0.0;
            for micro in 0..MICRO {
                let is_last = micro + 1 == MICRO;
                set_last(&model, is_last)?;
                let rank = micro * world.size() + world.rank();
                let loss = (case.loss)(&model, rank, step, &device).div_scalar(MICRO as f32);
                value += loss.clone().into_scalar::<f32>();
                let before = world.counts();
                let gradients = backward(loss, &model)?;
                let counts = world.counts().since(&before);
                assert_eq!(memory(&model)?.unreduced, 0, "no gradient is held whole");
                assert!(counts.total().operations > 0);
                if is_last {
                    model = optim.step(1e-2, model, gradients)
                } else {
                    assert_eq!(gradients.len(), 0, "nothing for the optimizer yet")
                }
            }
            losses.push(value);
        }
        Ok(Outcome {
            losses,
            params: whole_params((case.build)(&device), &model),
        })
    });
    joined(&outcomes)
}

#[test]
fn the_last_backward_returns_all_gradients() {
    let blocks = || {
        ShardPolicy::new()
            .units(["blocks.*"])
            .audit(Audit::EveryStep)
    };
    for policy in [
        blocks(),
        blocks().prefetch(1),
        blocks().shard_vectors(true),
        blocks().strategy(Strategy::ShardGradOp),
        blocks().strategy(Strategy::NoShard),
    ] {
        for ranks in [1, 2, 3] {
            let want = plainly(MLP, ranks * MICRO, STEPS);
            let got = handed_out_last(MLP, [1, ranks], policy.clone());
            assert_close(&got, &want, 1e-5);
        }
        let want = plainly(MLP, 4 * MICRO, STEPS);
        assert_close(&handed_out_last(MLP, [2, 2], policy), &want, 1e-5);
    }
    let want = plainly(CONV_NET, 2 * MICRO, STEPS);
    let convs = ShardPolicy::new().units(["convs.*"]);
    assert_close(&handed_out_last(CONV_NET, [1, 2], convs), &want, 1e-5);
}

/// What reductions there are before the last backward, and that divisors stay while their sums wait.
#[test]
fn sums_wait_on_the_shards_for_the_last_backward() {
    let seen = on_ranks(4, |world| {
        let device = device();
        let layout = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let model = seeded_by_rank((MLP.build)(&device), world.rank());
        let model = fully_shard(model, &mesh, policy.replicate_axis("replicate"))?;
        let groups = [mesh.along("shard")?, mesh.along("replicate")?, &world];
        let mut seen = Vec::new();
        for step in 0..4 {
            set_last(&model, step % 2 == 1)?;
            let before = groups.map(ProcessGroup::counts);
            backward((MLP.loss)(&model, world.rank(), step, &device), &model)?;
            let counts = groups.iter().zip(before).zip([
                OperationKind::ReduceScatter,
                OperationKind::AllReduce,
                OperationKind::AllReduce,
            ]);
            let counts = counts.map(|((group, before), kind)| {
                let counts = group.counts().since(&before);
                counts.of(kind).operations
            });
            seen.push(counts.collect::<Vec<_>>());
            let divided = units(&model)?[0].set_divide_factors(None);
            assert_eq!(divided.is_err(), step % 2 == 0, "{divided:?}");
        }
        Ok(seen)
    });
    for seen in seen {
        // Four units, which cross to the replicas once, and what is kept whole.
        assert_eq!(seen, [[4, 0, 1], [4, 4, 1], [4, 0, 1], [4, 4, 1]]);
    }
}

#[test]
fn units_switched_off_one_by_one_agree() {
    for ranks in [1, 2, 4] {
        let want = plainly(MLP, ranks * 2, STEPS);
        let outcomes = on_ranks(ranks, move |world| {
            let device = device();
            let policy = ShardPolicy::new().units(["blocks.*"]);
            let mut model = build(MLP, &world, &device, policy)?;
            let mut optim = optimizer();
            let mut losses = Vec::new();
            for step in 0..STEPS {
                let mut accumulator = GradientsAccumulator::new();
                let mut value = 0.0;
                for micro in 0..2 {
                    for handle in units(&model)? {
                        let wait = handle.name().ends_with('1') && micro == 0;
                        handle.set_requires_gradient_sync(!wait)?;
                        handle.set_reshard_after_backward(micro == 1)?;
                    }
                    let rank = micro * world.size() + world.rank();
                    let loss = (MLP.loss)(&model, rank, step, &device).div_scalar(2.0);
                    value += loss.clone().into_scalar::<f32>();
                    let gradients = backward(loss, &model)?;
                    accumulator.accumulate(&model, gradients);
                }
                losses.push(value);
                model = optim.step(1e-2, model, accumulator.grads());
            }
            assert_eq!(unused_units(&model)?, Vec::<String>::new());
            let params = whole_params((MLP.build)(&device), &model);
            Ok(Outcome { losses, params })
        });
        assert_close(&joined(&outcomes), &want, 1e-5);
    }
}
