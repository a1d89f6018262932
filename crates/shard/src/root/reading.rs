//! Forwards without autodiff: the unit that was read last, and gathers that start ahead of their use.
//!
//! Outside of [`evaluate`](crate::evaluate), all ranks read the same units in the same order. So each rank expects the
//! units of its last forward again, and all ranks expect the same ones. No messages are needed.

use std::sync::{Arc, Weak};

use super::pass::Place;
use crate::copies::{Generation, UnitState};
use crate::error::Error;

/// The number of uses of units after which a forward ends that has not returned to its first parameter.
const LONGEST: usize = 4096;

/// The uses of units in the current forward without autodiff, and in the last one.
#[derive(Default)]
pub(super) struct Reading {
    /// The values whose unit was last read.
    pub(super) last: Weak<Generation>,
    /// The first parameter that the forward read, with its unit. Reading it again after another unit begins a new
    /// forward.
    first: Option<(usize, Place)>,
    /// The units that the forward has used so far, in order.
    used: Vec<usize>,
    /// The units that the last forward used, in order.
    recorded: Vec<usize>,
    /// The values whose gathers were started ahead of their use.
    pub(super) ahead: Vec<Weak<Generation>>,
}

impl Reading {
    /// Notes a read of the parameter at `place` in `generation`. Returns true if the forward uses the unit for the first
    /// time.
    pub(super) fn enter(&mut self, generation: &Arc<Generation>, place: Place) -> bool {
        let unit = generation.unit.position();
        let is_other =
            |ahead: &Weak<Generation>| !std::ptr::eq(ahead.as_ptr(), Arc::as_ptr(generation));
        self.ahead.retain(is_other);
        let has_left = self.used.len() > 1;
        let is_again = has_left && self.first == Some((unit, place));
        if is_again || self.used.len() == LONGEST {
            self.discard();
            self.recorded = std::mem::take(&mut self.used);
        }
        if self.used.is_empty() {
            self.first = Some((unit, place));
        }
        let is_first = !self.used.contains(&unit);
        if self.used.last() != Some(&unit) {
            self.used.push(unit);
        }
        is_first
    }

    /// Returns the next `number` units if the forward uses the same units as the last one.
    pub(super) fn expected(&self, number: usize) -> Vec<usize> {
        let rest = self.recorded.strip_prefix(&self.used[..]);
        let next = rest.unwrap_or_default().iter();
        next.take(number).copied().collect()
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
