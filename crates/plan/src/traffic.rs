//! The traffic between the ranks in a step.

use serde::Serialize;

use burn_fsdp_spmd::graph::{CollectiveKind, Graph};

/// The collectives of one kind in a step: their number and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tally {
    /// Number of collectives.
    pub operations: u64,
    /// Total size of the whole tensors in bytes.
    pub bytes: u64,
    /// Bytes that one rank sends in ring algorithms: `(n - 1) / n` of the whole tensors, twice as many for all-reduce,
    /// and `(n - 1) / n` of a rank's part for all-to-all.
    pub sent: u64,
}

/// The collectives of a step, counted by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Traffic {
    /// Gathers of shards into whole tensors.
    pub all_gather: Tally,
    /// Reductions of whole tensors to shards.
    pub reduce_scatter: Tally,
    /// Reductions of whole tensors to the whole result.
    pub all_reduce: Tally,
    /// Exchanges of shards along one dim for shards along another.
    pub all_to_all: Tally,
}

impl Traffic {
    /// Counts the collectives of a graph.
    pub fn of_graph(graph: &Graph) -> Self {
        let mut traffic = Self::default();
        for (_, collective) in graph.collectives() {
            traffic.add(
                collective.kind,
                collective.num_bytes() as u64,
                graph.num_ranks(),
            );
        }
        traffic
    }

    /// Counts one collective of whole tensors with `bytes` in total.
    pub fn add(&mut self, kind: CollectiveKind, bytes: u64, num_ranks: usize) {
        let ranks = num_ranks.max(1) as u128;
        let circulating = u128::from(kind.circulating_bytes(bytes, num_ranks));
        let times = u128::from(kind.rounds());
        let tally = match kind {
            CollectiveKind::AllGather => &mut self.all_gather,
            CollectiveKind::ReduceScatter => &mut self.reduce_scatter,
            CollectiveKind::AllReduce => &mut self.all_reduce,
            CollectiveKind::AllToAll => &mut self.all_to_all,
        };
        tally.operations += 1;
        tally.bytes += bytes;
        tally.sent += (times * circulating * (ranks - 1) / ranks) as u64;
    }

    /// Returns the tally of each kind.
    pub fn by_kind(&self) -> [(CollectiveKind, Tally); 4] {
        [
            (CollectiveKind::AllGather, self.all_gather),
            (CollectiveKind::ReduceScatter, self.reduce_scatter),
            (CollectiveKind::AllReduce, self.all_reduce),
            (CollectiveKind::AllToAll, self.all_to_all),
        ]
    }
}
