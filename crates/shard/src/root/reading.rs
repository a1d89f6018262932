//! Forwards without autodiff: the unit that was read last, and gathers that start ahead of their use.
//!
//! Outside of [`evaluate`](crate::evaluate), all ranks read the same units in the same order. So each rank expects the
//! units of its last forward of the same copy again, and all ranks expect the same ones. No messages are needed.

use std::sync::{Arc, Weak};

use crate::copies::{Generation, UnitState};
use crate::error::Error;

/// The uses of units in the current forward without autodiff, and in the last one.
#[derive(Default)]
pub(super) struct Reading {
    /// The values whose unit was last read.
    pub(super) last: Weak<Generation>,
    /// The values that the forward has used so far, in order. Using one of them again after another begins a new
    /// forward.
    used: Vec<Weak<Generation>>,
    /// The values that the last forward used, in order.
    recorded: Vec<Weak<Generation>>,
    /// The values whose gathers were started ahead of their use.
    pub(super) ahead: Vec<Weak<Generation>>,
}

impl Reading {
    /// Notes a read of a parameter of `generation`. Returns true if the last read was of another unit.
    pub(super) fn enter(&mut self, generation: &Arc<Generation>) -> bool {
        let is_it = |known: &Weak<Generation>| known.as_ptr() == Arc::as_ptr(generation);
        self.ahead.retain(|ahead| !is_it(ahead));
        if self.used.last().is_some_and(is_it) {
            return false;
        }
        self.used.retain(|used| used.strong_count() > 0);
        if let Some(begin) = self.used.iter().position(is_it) {
            self.recorded = self.used.split_off(begin);
            self.used.clear();
        }
        self.used.push(Arc::downgrade(generation));
        true
    }

    /// Returns the next `number` values if the forward uses the same ones as the last. At the first unit, returns none:
    /// it may also be the end of the last forward, for example the head of a root that has the embedding, too.
    pub(super) fn expected(&self, number: usize) -> Vec<Arc<Generation>> {
        let mut pairs = self.used.iter().zip(&self.recorded);
        let is_same = pairs.all(|(used, recorded)| used.ptr_eq(recorded));
        match self.recorded.get(self.used.len()..) {
            Some(next) if is_same && self.used.len() > 1 => {
                next.iter().take(number).filter_map(Weak::upgrade).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the values of `units` that the last forward used, if it also used `generation`.
    pub(super) fn listed(
        &self,
        generation: &Arc<Generation>,
        units: &[usize],
    ) -> Vec<Arc<Generation>> {
        let recorded: Vec<_> = self.recorded.iter().filter_map(Weak::upgrade).collect();
        if !recorded.iter().any(|known| Arc::ptr_eq(known, generation)) {
            return Vec::new();
        }
        let of_unit = |unit: &usize| recorded.iter().find(|known| known.unit.position() == *unit);
        units.iter().filter_map(of_unit).cloned().collect()
    }

    /// Cancels the gathers that no read has used.
    pub(super) fn discard(&mut self) {
        let unused = self.ahead.drain(..).filter_map(|ahead| ahead.upgrade());
        for generation in unused.filter(|ahead| ahead.life.state() == UnitState::Gathering) {
            generation.life.drop_full();
        }
    }

    /// Ends the forward, and frees the full parameters that were last read.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        self.discard();
        let last = std::mem::take(&mut self.last).upgrade();
        match last.filter(|last| !last.unit.keeps()) {
            Some(last) => last.let_go(),
            None => Ok(()),
        }
    }
}
