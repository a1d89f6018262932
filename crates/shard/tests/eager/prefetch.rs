//! Gathers ahead of their use, and reductions behind it: their number in progress at once, and their direction.

use burn_fsdp_collectives::{CommStage, OperationKind};
use burn_fsdp_shard::{ShardPolicy, backward};

use super::bench::{build, device, on_ranks, optimizer};
use super::nets::MLP;

/// The maximum number of gathers in progress at once in the third step, in forward and in backward, and of reductions.
fn most_at_once(ranks: usize, prefetch: usize) -> Vec<([usize; 2], usize)> {
    on_ranks(ranks, move |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["blocks.*"]).prefetch(prefetch);
        let mut model = build(MLP, &world, &device, policy)?;
        let mut optim = optimizer();
        for step in 0..3 {
            if step == 2 {
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
            for most in most_at_once(ranks, prefetch) {
                assert_eq!(
                    most,
                    (want, reductions),
                    "prefetch {prefetch} on {ranks} ranks"
                );
            }
        }
    }
}
