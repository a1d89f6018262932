//! Forwards without autodiff: the unit that was read last, and gathers that start ahead of their use.
//!
//! Outside of [`evaluate`](crate::evaluate), all ranks read the same units in the same order. So each rank expects the
//! units of its last forward again, and all ranks expect the same ones. No messages are needed.

use std::sync::{Arc, Weak};

use burn::tensor::Tensor;

use super::pass::Place;
use super::state::{Progress, Root};
use crate::ambient;
use crate::copies::{Generation, UnitState};
use crate::error::Error;
use crate::schedule::Operation;

/// The number of uses of units after which a forward ends that has not returned to its first parameter.
const LONGEST: usize = 4096;

/// The uses of units in the current forward without autodiff, and in the last one.
#[derive(Default)]
pub(super) struct Reading {
    /// The values whose unit was last read.
    last: Weak<Generation>,
    /// The first parameter that the forward read, with its unit. Reading it again after another unit begins a new
    /// forward.
    first: Option<(usize, Place)>,
    /// The units that the forward has used so far, in order.
    used: Vec<usize>,
    /// The units that the last forward used, in order.
    recorded: Vec<usize>,
    /// The values whose gathers were started ahead of their use.
    ahead: Vec<Weak<Generation>>,
}

impl Reading {
    /// Notes a read of the parameter at `place` in `generation`. Returns true if the forward uses the unit for the first
    /// time.
    fn enter(&mut self, generation: &Arc<Generation>, place: Place) -> bool {
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
    fn expected(&self, number: usize) -> Vec<usize> {
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

impl Root {
    /// Returns a full parameter without autodiff, and frees the parameters of the unit that was read before.
    pub(super) fn read<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        place: Place,
    ) -> Result<Tensor<D>, Error> {
        let (unit, slot) = (&generation.unit, place.slot);
        let full = self.step(|progress| {
            let last = progress.reading.last.upgrade();
            if let Some(last) = last
                && !Arc::ptr_eq(&last, generation)
                && !last.unit.keeps()
            {
                last.let_go()?;
            }
            progress.reading.last = Arc::downgrade(generation);
            if unit.is_gathered_for(slot) {
                if generation.life.is_sharded() {
                    progress.meet_others(generation)?;
                    let operation = Operation::UnshardForward(unit.position());
                    self.start_gather(generation, operation)?;
                }
                // Reads by the engine, for example to save a module, belong to no forward.
                if progress.routes.is_none() && !ambient::is_engine() {
                    let is_first = progress.reading.enter(generation, place);
                    progress.read_ahead(self, generation, is_first)?;
                }
                self.finish_gather(generation)?;
            }
            self.weight(generation, slot)
        })?;
        Ok(full.reshape::<D, _>(unit.slots[slot].dims::<D>()))
    }
}

impl Progress {
    /// Starts the gathers that follow a read of `generation`: those of the units that the program listed for its unit,
    /// if the forward uses it for the first time, or else the next ones of the last forward, up to the prefetch limit.
    fn read_ahead(
        &mut self,
        root: &Root,
        generation: &Generation,
        is_first: bool,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        let next = match unit.listed_after(Operation::UnshardForward(unit.position())) {
            Some(listed) if is_first => listed.into_iter().filter_map(Operation::unit).collect(),
            Some(_) => Vec::new(),
            None => self.reading.expected(root.prefetch()),
        };
        for unit in next {
            let copies = root.copies(unit);
            let next = copies.and_then(|copies| copies.of_pass(generation.epoch()));
            if let Some(next) = next.filter(|next| next.life.is_sharded()) {
                root.start_gather(&next, Operation::UnshardForward(unit))?;
                self.reading.ahead.push(Arc::downgrade(&next));
            }
        }
        Ok(())
    }
}
