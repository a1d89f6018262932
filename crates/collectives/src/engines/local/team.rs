//! The ranks of a group.

use std::sync::Arc;

use burn_fsdp_rendezvous::Control;
use burn_fsdp_transport::BufferPool;

/// The members of a group, and their failure domain.
#[derive(Debug)]
pub(super) struct Team {
    pub(super) control: Arc<Control>,
    /// The pool of each member. All ranks live in this process.
    pools: Vec<BufferPool>,
}

impl Team {
    pub(super) fn new(control: Arc<Control>, pools: Vec<BufferPool>) -> Self {
        Self { control, pools }
    }

    /// Returns the number of ranks.
    pub(super) fn size(&self) -> usize {
        self.pools.len()
    }

    /// Wakes the waiting ranks.
    pub(super) fn ring(&self) {
        self.control.ring();
    }

    /// Returns the pool of a member.
    pub(super) fn pool(&self, rank: usize) -> &BufferPool {
        &self.pools[rank]
    }
}
