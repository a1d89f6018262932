//! The engine of ranks that are threads of one process.
//!
//! Ranks publish their sources and read each other's memory. `src/README.md` of this crate
//! describes the protocol and explains why it is correct.

mod flight;
mod group;
mod round;
mod team;
mod transfer;

use std::sync::Arc;
use std::time::Duration;

use self::group::LocalGroup;
use crate::control::Control;
use crate::rank_state::RankState;
use crate::world::{NobodyElse, World};
use crate::{Check, ProcessGroup};

/// Returns the ends of the group of all ranks of a new world, by rank.
pub(crate) fn groups(num_ranks: usize, deadline: Duration, check: Check) -> Vec<ProcessGroup> {
    let states: Vec<_> = (0..num_ranks)
        .map(|rank| Arc::new(RankState::new(rank, check)))
        .collect();
    let ranks = states.iter().cloned().map(Some).collect();
    let world = World::new(ranks, Box::new(NobodyElse));
    let control = Control::of_world(world, deadline);
    let members: Arc<[usize]> = (0..num_ranks).collect();
    let group = LocalGroup::new(control, members.clone());
    let end = |(rank, state)| {
        let engine = Box::new(LocalGroup::end(&group, rank));
        ProcessGroup::new("world".into(), rank, members.clone(), engine, state)
    };
    states.into_iter().enumerate().map(end).collect()
}
