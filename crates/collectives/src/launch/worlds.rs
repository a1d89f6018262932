//! Worlds of ranks, each with the engine of the launch. This is the only place that chooses an engine.

use std::sync::Arc;
use std::time::Duration;

use crate::engines::{fake, local};
use crate::group::ProcessGroup;
use burn_fsdp_rendezvous::{Check, Control, Messenger, NobodyElse, RankState, World};
use burn_fsdp_transport::{BufferPool, Engine};

/// Returns each rank's group of all ranks, for a new world of threads.
pub(super) fn of_threads(num_ranks: usize, deadline: Duration, check: Check) -> Vec<ProcessGroup> {
    let state = |rank| Arc::new(RankState::new(rank, check));
    let states: Vec<_> = (0..num_ranks).map(state).collect();
    let pools: Vec<_> = states.iter().map(|_| BufferPool::new()).collect();
    let ranks = states.iter().cloned().map(Some).collect();
    let control = Control::of_world(World::new(ranks, Box::new(NobodyElse)), deadline);
    let members: Arc<[usize]> = (0..num_ranks).collect();
    let handles = local::handles(&control, pools.clone());
    let own = states.into_iter().zip(pools);
    let group = |((rank, engine), own)| {
        ProcessGroup::new("world".into(), rank, members.clone(), engine, own)
    };
    handles
        .into_iter()
        .enumerate()
        .zip(own)
        .map(group)
        .collect()
}

/// Returns the handle of rank `rank`, the only existing rank of a group of `size` ranks.
pub(super) fn of_one(size: usize, rank: usize) -> ProcessGroup {
    let here = Here {
        name: "fake",
        size,
        rank,
        deadline: Duration::MAX,
        check: Check::Calls,
    };
    here.group(Box::new(NobodyElse), |control, _| {
        fake::handle(control, size, rank)
    })
}

/// The only rank of a world that lives in this process.
pub(super) struct Here {
    /// The name of the group of all ranks.
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) rank: usize,
    pub(super) deadline: Duration,
    pub(super) check: Check,
}

impl Here {
    /// Returns the rank's group of all ranks.
    pub(super) fn group(
        self,
        messenger: Box<dyn Messenger>,
        handle: impl FnOnce(Arc<Control>, &BufferPool) -> Box<dyn Engine>,
    ) -> ProcessGroup {
        let state = Arc::new(RankState::new(self.rank, self.check));
        let mut ranks = vec![None; self.size];
        ranks[self.rank] = Some(state.clone());
        let control = Control::of_world(World::new(ranks, messenger), self.deadline);
        let pool = BufferPool::new();
        let engine = handle(control, &pool);
        let members = (0..self.size).collect();
        ProcessGroup::new(self.name.into(), self.rank, members, engine, (state, pool))
    }
}
