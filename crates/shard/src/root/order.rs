//! The order of operations, and the values that its gathers use.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use crate::copies::{Copied, Generation};
use crate::schedule::{Schedule, Schedules};

/// The orders of operations, and the gathers and values of the current step.
#[derive(Default)]
pub(super) struct Order {
    pub(super) schedules: Schedules,
    /// Gathers that were started ahead of their use, in order.
    pub(super) prefetched: VecDeque<Ahead>,
    /// The copy of the module that the current pass uses.
    pub(super) copy: Copied,
    /// The values that the current pass has used, by the unit's position.
    pub(super) used: BTreeMap<usize, Weak<Generation>>,
}

/// A gather that was started ahead of its use.
pub(super) struct Ahead {
    pub(super) position: usize,
    pub(super) generation: Arc<Generation>,
    /// True if this rank takes part in the gather only for the other ranks, because it already had the full parameters
    /// or was gathering them.
    pub(super) is_joined: bool,
}

impl Ahead {
    /// Cancels the gather, if it is still in progress.
    pub(super) fn discard(self) {
        if !self.is_joined && !self.generation.life.is_unsharded() {
            self.generation.life.drop_full();
        }
    }

    /// Returns true if this gathers the full parameters of `generation`.
    pub(super) fn is_for(&self, generation: &Arc<Generation>) -> bool {
        !self.is_joined && Arc::ptr_eq(&self.generation, generation)
    }
}

impl Order {
    pub(super) fn current(&mut self) -> &mut Schedule {
        self.schedules.current()
    }

    /// Takes the prefetched gather for `position`, if there is one.
    pub(super) fn take_prefetched(&mut self, position: Option<usize>) -> Option<Ahead> {
        let position = position?;
        let first = self.prefetched.front()?;
        if first.position == position {
            self.prefetched.pop_front()
        } else {
            None
        }
    }

    pub(super) fn discard_prefetched(&mut self) {
        std::mem::take(&mut self.prefetched)
            .into_iter()
            .for_each(Ahead::discard);
    }
}
