//! The ranks of a group.

use std::sync::Arc;

use crate::BufferPool;
use crate::bell::Bell;
use crate::control::Control;

/// The members of a group, and their failure domain.
#[derive(Debug)]
pub(super) struct Team {
    pub(super) control: Arc<Control>,
    /// The members by their rank in the world, in the order of their ranks in this group.
    pub(super) members: Arc<[usize]>,
}

impl Team {
    /// Returns the number of ranks.
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the bell that waiting ranks listen to.
    pub(super) fn bell(&self) -> &Bell {
        &self.control.world.bell
    }

    /// Returns the pool of a member. All ranks live in this process.
    pub(super) fn pool(&self, rank: usize) -> BufferPool {
        let member = self.control.world.rank(self.members[rank]);
        member.map_or_else(BufferPool::new, |member| member.pool.clone())
    }
}
