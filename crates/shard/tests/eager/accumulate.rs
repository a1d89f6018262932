//! Gradient accumulation: a step made of micro-batches.

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, memory, no_sync, num_params, units, unused_units,
};

use super::bench::{
    Case, Outcome, assert_close, build, device, joined, on_ranks, optimizer, plainly, whole_params,
};
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
                let gradients = match synced || is_last {
                    true => run()?,
                    false => {
                        let gradients = no_sync(&model, run)??;
                        assert_eq!(gradients.len(), 0, "nothing for the optimizer yet");
                        gradients
                    }
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

/// The traffic that `no_sync` saves and the memory that it costs, to the byte.
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
