//! Gathers ahead of their use, and reductions behind it: their number in progress at once, and their direction.

use burn_fsdp_collectives::{CommStage, OperationKind};
use burn_fsdp_shard::{
    Error, FullGradient, ParameterShard, ShardPolicy, Strategy, UnitHandle, backward,
    backward_and_step, units,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::bench::{
    Case, assert_close, build, device, joined, on_ranks, optimizer, plainly, sharded, train,
};
use super::nets::{MLP, Mlp, input};
use super::unused::{BARE, Routed, TWICE, UNEVEN};

/// The maximum number of gathers in progress at once in step `recorded`, in forward and in backward, and of reductions.
/// `list` sets what units gather ahead.
fn most_at_once(
    ranks: usize,
    prefetch: usize,
    recorded: usize,
    list: fn(&[UnitHandle]) -> Result<(), Error>,
) -> Vec<([usize; 2], usize)> {
    most_by(ranks, blocks().prefetch(prefetch), recorded, list)
}

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn most_by(
    ranks: usize,
    policy: ShardPolicy,
    recorded: usize,
    list: fn(&[UnitHandle]) -> Result<(), Error>,
) -> Vec<([usize; 2], usize)> {
    on_ranks(ranks, move |world| {
        let device = device();
        let policy = policy.clone();
        let mut model = build(MLP, &world, &device, policy)?;
        list(&units(&model)?)?;
        let mut optim = optimizer();
        for step in 0..=recorded {
            if step == recorded {
                world.start_recording(|| 0);
            }
            let loss = model.loss(world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let mut spans = world.end_recording();
        spans.sort_by_key(|span| span.start);
        let most = |kind: OperationKind, word: &str| {
            let (mut now, mut most) = (0, 0);
            for span in &spans {
                let operation = &span.operation;
                if operation.kind != kind || !operation.label.as_str().contains(word) {
                    continue;
                }
                now = match span.stage {
                    CommStage::Start => now + 1,
                    _ => now - 1,
                };
                most = most.max(now);
            }
            assert_eq!(now, 0, "every {kind} is waited for");
            most
        };
        let gathers = ["forward", "backward"].map(|word| most(OperationKind::AllGather, word));
        Ok((gathers, most(OperationKind::ReduceScatter, "")))
    })
}

/// The root and three blocks are gathered in forward, and the blocks again in backward: the unit in use, and
/// the units ahead of it, if there are any. Where anything is prefetched, one reduction is still under way when the next starts.
#[test]
fn prefetching_respects_its_limit() {
    for ranks in 2..=3 {
        for (prefetch, want, reductions) in [
            (0, [1, 1], 1),
            (1, [2, 2], 2),
            (2, [3, 3], 2),
            (3, [4, 3], 2),
        ] {
            for most in most_at_once(ranks, prefetch, 2, |_| Ok(())) {
                assert_eq!(
                    most,
                    (want, reductions),
                    "prefetch {prefetch} on {ranks} ranks"
                );
            }
        }
    }
}

/// Collectives of hooks are in progress as long as the engine's own.
#[test]
fn collectives_of_hooks_overlap_like_those_of_the_engine() {
    let hooked = |prefetch| {
        blocks()
            .prefetch(prefetch)
            .gather_hook(|unit| {
                let shards = unit.shards().iter().map(ParameterShard::tensor);
                Ok(unit.all_gather(shards.collect())?.map(|full| full))
            })
            .reduction_hook(|unit| {
                unit.reduce_scatter(unit.gradients().iter().map(FullGradient::tensor).collect())
            })
    };
    for ranks in 2..=3 {
        for (prefetch, want) in [(0, ([1, 1], 1)), (1, ([2, 2], 2)), (2, ([3, 3], 2))] {
            for most in most_by(ranks, hooked(prefetch), 2, |_| Ok(())) {
                assert_eq!(most, want, "prefetch {prefetch} on {ranks} ranks");
            }
            let got = sharded(MLP, ranks, 4, hooked(prefetch));
            let want = sharded(MLP, ranks, 4, blocks().prefetch(prefetch));
            assert_eq!(got.params, want.params);
        }
    }
}

/// The units of the net are the root and its blocks.
fn list_blocks(handles: &[UnitHandle]) -> Result<(), Error> {
    let blocks = &handles[1..];
    handles[0].set_forward_prefetch(&blocks[..2])?;
    blocks[0].set_forward_prefetch(&[][..])?;
    blocks[1].set_forward_prefetch(&blocks[2..])?;
    blocks[2].set_backward_prefetch(&blocks[..2])?;
    blocks[1].set_backward_prefetch(&[][..])
}

#[test]
fn lists_prefetch_in_the_first_step_and_later() {
    for ranks in 2..=3 {
        for (recorded, prefetch) in [(0, 0), (0, 1), (2, 0)] {
            let nothing = most_at_once(ranks, prefetch, 0, |_| Ok(()));
            // Without lists, a first forward gathers nothing ahead, and backward reverses it.
            let want = [1, 1 + prefetch];
            assert!(nothing.iter().all(|most| most.0 == want), "{nothing:?}");
            for most in most_at_once(ranks, prefetch, recorded, list_blocks) {
                assert_eq!(most.0, [3, 3], "step {recorded} on {ranks} ranks");
            }
        }
    }
}

/// A unit that the optimizer has stepped is not gathered again, even if a list says so.
#[test]
fn lists_do_not_gather_stepped_units() {
    for (ranks, steps) in [(2, 1), (3, 4)] {
        on_ranks(ranks, move |world| {
            let device = device();
            let policy = ShardPolicy::new().units(["layers.*"]).prefetch(0);
            let mut model = build(UNEVEN, &world, &device, policy)?;
            let handles = units(&model)?;
            for handle in &handles {
                handle.set_backward_prefetch(&handles[1..])?;
            }
            let layers: &[usize] = match world.rank() {
                0 => &[1, 0, 3],
                _ => &[1, 0],
            };
            let mut optim = optimizer();
            for step in 0..steps {
                let loss = model.through(layers, world.rank(), step, &device);
                model = backward_and_step(loss, model, &mut optim, 1e-2)?;
            }
            Ok(())
        });
    }
}

/// `None` selects the recorded order again.
#[test]
fn lists_can_be_removed() {
    let list = |handles: &[UnitHandle]| {
        list_blocks(handles)?;
        for handle in handles {
            handle.set_forward_prefetch(None)?;
            handle.set_backward_prefetch(None)?;
        }
        Ok(())
    };
    for most in most_at_once(2, 1, 2, list) {
        assert_eq!(most.0, [2, 2]);
    }
}

/// Each unit gets lists of random units: itself, earlier ones, and some that this rank or no rank uses.
fn list_at_random(handles: &[UnitHandle], seed: u64) -> Result<(), Error> {
    let mut random = StdRng::seed_from_u64(seed);
    for handle in handles {
        let mut some = || -> Vec<UnitHandle> {
            let number = random.random_range(0..=3);
            let one = |_| handles[random.random_range(0..handles.len())].clone();
            (0..number).map(one).collect()
        };
        let (forward, backward) = (some(), some());
        handle.set_forward_prefetch(&forward[..])?;
        handle.set_backward_prefetch(&backward[..])?;
    }
    Ok(())
}

/// Lists change when units are gathered, and nothing else, whatever they name.
#[test]
fn lists_do_not_change_results() {
    let layers = || ShardPolicy::new().units(["layers.*"]);
    for ranks in 1..=4 {
        for (number, case) in [UNEVEN, TWICE, BARE, SKIPPING].into_iter().enumerate() {
            for policy in [
                layers(),
                layers().reshard_root(true),
                layers().strategy(Strategy::ShardGradOp),
                layers().prefetch(2),
            ] {
                let want = sharded(case, ranks, 5, policy.clone());
                assert_close(&want, &plainly(case, ranks, 5), 1e-5);
                for seed in 0..3 {
                    let policy = policy.clone();
                    let seed = seed + 100 * number as u64;
                    let got = joined(&on_ranks(ranks, move |world| {
                        let device = device();
                        let model = build(case, &world, &device, policy.clone())?;
                        list_at_random(&units(&model)?, seed)?;
                        train(model, case, world.rank(), 5, &device)
                    }));
                    assert_eq!(got.params, want.params, "seed {seed} on {ranks} ranks");
                }
            }
        }
    }
}

/// Layer 1 is used in every second step only.
const SKIPPING: Case<Routed> = Case {
    build: Routed::new,
    loss: |model, rank, step, device| {
        let mut x = input([2, 5], rank, step, device);
        for (number, layer) in model.layers.iter().enumerate() {
            if number != 1 || step % 2 == 0 {
                x = layer.forward(x);
            }
        }
        model.head.forward(x).powf_scalar(2.0).mean()
    },
};

#[test]
fn units_of_another_module_cannot_be_listed() {
    on_ranks(2, |world| {
        let device = device();
        let model: Mlp = build(MLP, &world, &device, ShardPolicy::new())?;
        let other: Mlp = build(MLP, &world, &device, ShardPolicy::new())?;
        let error = units(&model)?[0].set_forward_prefetch(&units(&other)?[..]);
        assert!(matches!(error, Err(Error::Option { .. })), "{error:?}");
        Ok(())
    });
}
