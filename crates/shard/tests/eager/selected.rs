//! Regions that the policy selects.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Tensor};
use burn_fsdp_shard::{ShardPolicy, backward, recompute};

use super::bench::{Case, assert_close, build, device, on_ranks, panic_of, plainly, sharded};
use super::nets::{Block, MLP, Mlp, tokens};

/// The loss with a region around each block; `runs` counts how often each block's forward runs.
fn in_regions(
    model: &Mlp,
    rank: usize,
    step: usize,
    device: &Device,
    runs: &Arc<[AtomicUsize; 3]>,
) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for (number, block) in model.blocks.iter().enumerate() {
        let runs = runs.clone();
        x = recompute(block, x, move |block: &Block, x| {
            runs[number].fetch_add(1, Ordering::Relaxed);
            block.forward(x)
        });
    }
    let x = model.head.forward(model.norm.forward(x));
    x.powf_scalar(2.0).mean()
}

/// How often the forward of each block runs in a step of one rank.
fn runs(ranks: usize, policy: ShardPolicy) -> [usize; 3] {
    let all = on_ranks(ranks, move |world| {
        let device = device();
        let model = build(MLP, &world, &device, policy.clone())?;
        let runs = Arc::new([const { AtomicUsize::new(0) }; 3]);
        let loss = in_regions(&model, world.rank(), 0, &device, &runs);
        backward(loss, &model)?;
        Ok([0, 1, 2].map(|number| runs[number].load(Ordering::Relaxed)))
    });
    assert!(all.iter().all(|runs| *runs == all[0]), "{all:?}");
    all[0]
}

const REGIONS: Case<Mlp> = Case {
    build: MLP.build,
    loss: |model, rank, step, device| in_regions(model, rank, step, device, &Arc::default()),
};

#[test]
fn regions_are_recomputed_where_the_policy_selects_them() {
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    let select = |patterns: &[&str]| blocks().recompute_in(patterns.iter().copied());
    for (policy, want) in [
        (blocks(), [2, 2, 2]),
        (select(&["blocks.*"]), [2, 2, 2]),
        (select(&["blocks.0", "blocks.2"]), [2, 1, 2]),
        (select(&["**"]), [2, 2, 2]),
        (select(&[]), [1, 1, 1]),
        // Only a part of each block: not all parameters of a region are selected.
        (select(&["blocks.*.up"]), [1, 1, 1]),
        (ShardPolicy::new().recompute_in(["blocks.1"]), [1, 2, 1]),
    ] {
        for ranks in 1..=3 {
            assert_eq!(runs(ranks, policy.clone()), want, "{policy:?}");
            let got = sharded(REGIONS, ranks, 4, policy.clone());
            assert_close(&got, &plainly(MLP, ranks, 4), 1e-5);
        }
    }
}

#[test]
fn a_pattern_without_a_module_is_rejected() {
    let policy = ShardPolicy::new().recompute_in(["block.*"]);
    let message = panic_of(|| sharded(REGIONS, 1, 1, policy));
    assert!(message.contains("block.*"), "{message}");
}
