//! Sharding changes where numbers are computed, not the numbers.

use burn::module::Module;
use burn_fsdp_shard::{Cut, ShardPolicy, Strategy};

use super::bench::{Case, assert_close, plainly, sharded};
use super::nets::{CONV_NET, MLP, RECURRENT};

const TOLERANCE: f32 = 1e-5;
const STEPS: usize = 10;

fn agrees<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
    for ranks in 1..=4 {
        let want = plainly(case, ranks, STEPS);
        let got = sharded(case, ranks, STEPS, policy.clone());
        assert_close(&got, &want, TOLERANCE);
    }
}

#[test]
fn residual_network_agrees() {
    agrees(MLP, &ShardPolicy::new().units(["blocks.*"]));
}

#[test]
fn every_strategy_and_layout_agrees() {
    let policy = ShardPolicy::new().units(["blocks.*"]);
    agrees(MLP, &policy.clone().strategy(Strategy::ShardGradOp));
    agrees(MLP, &policy.clone().strategy(Strategy::NoShard));
    agrees(MLP, &policy.clone().cut(Cut::Dims));
    // The embedding alone is large enough to be cut.
    agrees(MLP, &policy.clone().whole_below(106));
    agrees(MLP, &policy.clone().prefetch(0));
    agrees(MLP, &policy.clone().prefetch(3));
    agrees(MLP, &policy.reshard_root(true));
}

#[test]
fn one_unit_agrees() {
    agrees(MLP, &ShardPolicy::new());
}

#[test]
fn units_inside_units_agree() {
    agrees(
        MLP,
        &ShardPolicy::new().units(["blocks", "blocks.*", "blocks.*.up", "head"]),
    );
}

#[test]
fn convolutions_agree() {
    agrees(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
}

#[test]
fn recurrent_network_agrees() {
    agrees(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
}
