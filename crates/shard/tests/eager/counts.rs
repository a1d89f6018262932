//! Exact numbers of collectives and bytes.

use burn_fsdp_collectives::{OperationCounts, OperationKind};
use burn_fsdp_shard::{ShardPolicy, Strategy, backward, memory, wrap_plan};

use super::bench::{build, device, on_ranks, optimizer, since};
use super::nets::MLP;

/// Counts of one step, the third, on every rank.
fn of_one_step(ranks: usize, policy: ShardPolicy) -> Vec<OperationCounts> {
    on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, policy.clone())?;
        let mut optim = optimizer();
        let mut before = world.counts();
        for step in 0..3 {
            before = world.counts();
            let loss = (MLP.loss)(&model, world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(since(&world, &before))
    })
}

#[track_caller]
fn assert_counts(counts: &OperationCounts, gathers: u64, scatters: u64, reduces: u64) {
    let number = |kind| counts.of(kind).operations;
    assert_eq!(number(OperationKind::AllGather), gathers, "all-gathers");
    assert_eq!(
        number(OperationKind::ReduceScatter),
        scatters,
        "reduce-scatters"
    );
    assert_eq!(number(OperationKind::AllReduce), reduces, "all-reduces");
    assert_eq!(number(OperationKind::Broadcast), 0, "broadcasts");
}

/// The root and three blocks.
const UNITS: u64 = 4;

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// If vectors are also sharded, a rank holds its share of everything, and nothing is reduced whole.
#[test]
fn vectors_may_be_shared_like_matrices() {
    let policy = || blocks().shard_vectors(true);
    for ranks in 1..=4 {
        let held = on_ranks(ranks, move |world| {
            let model = build(MLP, &world, &device(), policy())?;
            Ok(memory(&model)?.parameters)
        });
        let all: usize = 4 * (11 * 15 + 15 * 7 + 9 * 15 * 7 + 3 * (15 + 15 + 7 + 15) + 15 + 7);
        assert_eq!(held.iter().sum::<usize>(), all, "{ranks} ranks");
        for bytes in held {
            // Rounded up by at most one element for every parameter.
            assert!(bytes <= all / ranks + 4 * 26, "{bytes} on {ranks} ranks");
        }
        for counts in of_one_step(ranks, policy()) {
            assert_counts(&counts, 2 * UNITS - 1, UNITS, 0);
        }
    }
}

#[test]
fn full_shard_gathers_twice_but_for_the_root() {
    for ranks in 1..=4 {
        for prefetch in 0..3 {
            for counts in of_one_step(ranks, blocks().prefetch(prefetch)) {
                assert_counts(&counts, 2 * UNITS - 1, UNITS, 1);
            }
        }
    }
}

#[test]
fn resharding_the_root_gathers_it_for_each_use() {
    for counts in of_one_step(2, blocks().reshard_root(true)) {
        // Embedding and head are two uses of the root. The backward of Burn's embedding needs no
        // weight, so only the head's asks for another gather.
        assert_counts(&counts, 2 * (UNITS + 1) - 1, UNITS + 1, 1);
    }
}

#[test]
fn shard_grad_op_gathers_once() {
    for ranks in 1..=4 {
        for counts in of_one_step(ranks, blocks().strategy(Strategy::ShardGradOp)) {
            assert_counts(&counts, UNITS, UNITS, 1);
        }
    }
}

#[test]
fn no_shard_reduces_once_a_unit() {
    for ranks in 1..=4 {
        for counts in of_one_step(ranks, blocks().strategy(Strategy::NoShard)) {
            assert_counts(&counts, 0, 0, UNITS);
        }
    }
}

#[test]
fn bytes_count_full_tensors() {
    let block = 4 * (15 * 7 + 15 * 7 + 7 * 15);
    let root = 4 * (11 * 15 + 15 * 7);
    let whole = 4 * (3 * (15 + 15 + 7 + 15) + 15 + 7);
    for counts in of_one_step(3, blocks()) {
        let bytes = |kind| counts.of(kind).bytes;
        assert_eq!(bytes(OperationKind::AllGather), root + 2 * 3 * block);
        assert_eq!(bytes(OperationKind::ReduceScatter), root + 3 * block);
        assert_eq!(bytes(OperationKind::AllReduce), whole);
    }
}

#[test]
fn each_rank_holds_its_shards_and_the_whole_parameters() {
    for ranks in 1..=4 {
        let held = on_ranks(ranks, move |world| {
            let model = build(MLP, &world, &device(), blocks())?;
            let plan = wrap_plan(&model)?;
            assert_eq!(plan.held(), memory(&model)?.parameters);
            Ok(plan.held())
        });
        let sharded: usize = 4 * (11 * 15 + 15 * 7 + 9 * 15 * 7);
        let whole: usize = 4 * (3 * (15 + 15 + 7 + 15) + 15 + 7);
        assert_eq!(held.iter().sum::<usize>(), sharded + ranks * whole);
        for bytes in held {
            // A share for each rank, rounded up by at most one element for every parameter.
            assert!(
                bytes <= sharded / ranks + whole + 4 * 11,
                "{bytes} on {ranks} ranks"
            );
        }
    }
}

#[test]
fn parameters_below_the_limit_stay_whole() {
    let cut = 11 * 15;
    let whole = 15 * 7 + 9 * 15 * 7 + 3 * (15 + 15 + 7 + 15) + 15 + 7;
    let policy = || blocks().whole_below(15 * 7 + 1);
    for ranks in 1..=4 {
        let held = on_ranks(ranks, move |world| {
            let model = build(MLP, &world, &device(), policy())?;
            Ok(memory(&model)?.parameters)
        });
        // Divided as by `torch.chunk`.
        let chunk = usize::div_ceil(cut, ranks);
        let shares = (0..ranks).map(|rank| chunk.min(cut - rank * chunk));
        let want: Vec<_> = shares.map(|share| 4 * (share + whole)).collect();
        assert_eq!(held, want);
    }
    for counts in of_one_step(3, policy()) {
        // Only the embedding is gathered, by the root, which keeps it. Everything else is in one all-reduce.
        assert_counts(&counts, 1, 1, 1);
        let bytes = |kind| counts.of(kind).bytes as usize;
        assert_eq!(bytes(OperationKind::AllGather), 4 * cut);
        assert_eq!(bytes(OperationKind::ReduceScatter), 4 * cut);
        assert_eq!(bytes(OperationKind::AllReduce), 4 * whole);
    }
}
