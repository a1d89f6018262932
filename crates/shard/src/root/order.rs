//! The order of operations, and the values that its gathers use.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use crate::copies::{Copied, Generation};
use crate::schedule::{Operation, Schedule, Schedules};

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
    pub(super) operation: Operation,
    /// Position in the recorded order; `None` if ranks agree on the operations.
    pub(super) position: Option<usize>,
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

    /// Takes the prefetched gather for `operation` at `position`, if there is one.
    pub(super) fn take_prefetched(
        &mut self,
        operation: Operation,
        position: Option<usize>,
    ) -> Option<Ahead> {
        let mut prefetched = self.prefetched.iter();
        let is_it = |ahead: &Ahead| ahead.operation == operation && ahead.position == position;
        let place = prefetched.position(is_it)?;
        self.prefetched.remove(place)
    }

    /// Adds a prefetched gather. Those of the recorded order are kept in its order.
    pub(super) fn add_prefetched(&mut self, ahead: Ahead) {
        let mut prefetched = self.prefetched.iter();
        let later = prefetched.position(|other| other.position > ahead.position);
        self.prefetched
            .insert(later.unwrap_or(self.prefetched.len()), ahead);
    }

    /// Returns true if `operation` at `position` has been prefetched.
    pub(super) fn has_prefetched(&self, operation: Operation, position: Option<usize>) -> bool {
        let mut prefetched = self.prefetched.iter();
        prefetched.any(|ahead| ahead.operation == operation && ahead.position == position)
    }

    pub(super) fn discard_prefetched(&mut self) {
        self.discard_prefetched_if(|_| true);
    }

    /// Discards the prefetched gathers for which `is_discarded` returns true.
    pub(super) fn discard_prefetched_if(&mut self, is_discarded: impl Fn(&Ahead) -> bool) {
        let all = std::mem::take(&mut self.prefetched);
        let (discarded, kept): (Vec<_>, Vec<_>) = all.into_iter().partition(is_discarded);
        self.prefetched = kept.into();
        discarded.into_iter().for_each(Ahead::discard);
    }
}
