//! The engine of ranks that are threads of one process.
//!
//! Ranks publish their sources and read each other's memory, on the host and on devices. `src/README.md` of this crate
//! describes the protocol and explains why it is correct.

mod flight;
mod group;
mod round;
mod shared;
mod team;
mod transfer;

use std::sync::Arc;

use self::group::LocalGroup;
use burn_fsdp_rendezvous::Control;
use burn_fsdp_transport::{BufferPool, Engine};

/// Returns each rank's handle to the group of all ranks of a world, in rank order. `pools` has one pool per rank.
pub(crate) fn handles(control: &Arc<Control>, pools: Vec<BufferPool>) -> Vec<Box<dyn Engine>> {
    let ranks = 0..pools.len();
    let group = LocalGroup::new(control.clone(), pools);
    let handle = |rank| Box::new(LocalGroup::handle(&group, rank)) as Box<dyn Engine>;
    ranks.map(handle).collect()
}
