//! Backward: gathers units again, collects gradients, and passes them on unit by unit.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn::tensor::Tensor;

use super::accumulate::Gradient;
use super::state::{Phase, Progress, Root};
use crate::copies::{Copied, Generation};
use crate::error::Error;
use crate::op::Reduced;
use crate::read;
use crate::region::{self, RegionState, SharedUse};
use crate::schedule::Operation;
use crate::unit::Unit;

/// Stands for a use of a unit if a rank reduces gradients of earlier backwards only.
pub(super) const NO_USE: u64 = u64::MAX;

impl Root {
    /// Returns the full parameter for a node in backward, and gathers the unit again if necessary.
    pub(super) fn regather(
        &self,
        generation: &Arc<Generation>,
        slot: usize,
        use_id: u64,
    ) -> Result<Tensor<1>, Error> {
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            let gathered = unit.slots[slot].is_gathered();
            if gathered && !generation.life.is_unsharded() {
                progress.uses.note_late_unit(use_id);
                let operation = Operation::UnshardBackward(unit.position());
                progress.unshard(self, operation, generation)?;
            }
            self.full(generation, slot)
        })
    }

    /// Keeps a full gradient until the backward of its use ends.
    pub(super) fn receive(&self, unit: &Unit, slot: usize, use_id: u64, gradient: Tensor<1>) {
        let bytes = if unit.slots[slot].is_gathered() {
            unit.slots[slot].unsharded_bytes()
        } else {
            0
        };
        let account = self.pool.account(bytes);
        let mut progress = self.progress();
        progress.audited.came(unit, slot, use_id);
        let gradient = Gradient {
            tensor: gradient,
            account,
        };
        let of_uses = &mut progress.gradients.of_uses;
        let of_use = of_uses.entry(use_id).or_insert_with(|| unit.empty_slots());
        gradient.add_to(&mut of_use[slot]);
    }

    /// Ends the backward of a use, whose last gradient has arrived: frees the full parameters and starts the reduction.
    /// Returns the gradients of completed reductions. Only returns these if the use ended inside a region.
    pub(super) fn unit_end(
        &self,
        generation: &Arc<Generation>,
        shared: &SharedUse,
    ) -> Result<Vec<Reduced>, Error> {
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            if !shared.end() {
                return Ok(std::mem::take(&mut progress.reductions.done));
            }
            // Without a reduction there may be no optimizer step before the next forward. So weights that stay from
            // forward to backward may then also stay until that forward.
            let stays = unit.keeps() && !unit.syncs();
            let reshards = unit.switches.reshard_after_backward.load(Relaxed);
            // A gather in progress is for another use of the unit.
            if reshards && !stays && generation.life.is_unsharded() {
                generation.let_go()?;
            }
            progress.close_use(shared);
            let gradients = progress.gradients.of_uses.remove(&shared.id);
            let gradients = gradients.unwrap_or_else(|| unit.empty_slots());
            if unit.syncs() {
                progress.advance(self, Operation::Reduce(unit.position()))?;
                progress.reduce(self, (generation, shared.id), gradients)?;
            } else {
                let Progress {
                    gradients: held,
                    audited,
                    ..
                } = &mut **progress;
                held.hold(audited, &self.pool, (generation, shared.id), gradients)?;
            }
            // During a region's own backward, completed gradients wait for the step's backward.
            Ok(match region::state() {
                RegionState::Again => Vec::new(),
                RegionState::Off | RegionState::Plain => {
                    std::mem::take(&mut progress.reductions.done)
                }
            })
        })
    }

    /// Ends backward and completes all pending work of the step. Returns the gradients of completed reductions.
    pub(super) fn finish(&self) -> Result<Vec<Reduced>, Error> {
        self.step(|progress| {
            if progress.phase != Phase::Backward {
                // Two forwards in one loss end backward twice; the first end does all the work.
                return Ok(Vec::new());
            }
            progress.finish(self)
        })
    }

    /// Ends a step whose loss used no unit on this rank, so none of the engine's nodes ran. Takes part in all
    /// operations of the other ranks, with the values of copy `copy` of the module.
    pub(crate) fn finish_unused(&self, copy: Option<Copied>) -> Result<Vec<Reduced>, Error> {
        self.step(|progress| {
            if progress.uses.pass.is_none() {
                progress.order.copy = copy.unwrap_or(progress.order.copy);
                progress.order.used.clear();
                progress.begin_order(self);
            }
            progress.finish(self)
        })
    }
}

impl Progress {
    /// Notes that the backward of a use has ended.
    pub(super) fn close_use(&mut self, shared: &SharedUse) {
        self.uses.open.remove(&shared.id);
        self.order.current().end_use(shared.id);
    }

    fn finish(&mut self, root: &Root) -> Result<Vec<Reduced>, Error> {
        self.enter_backward(root)?;
        self.reduce_held(root)?;
        self.advance(root, Operation::Finish)?;
        if root.is_last() {
            self.hand_out_whole(root)?;
        }
        for copies in root.live() {
            copies.drop_pieces();
        }
        read::forget();
        // All ranks end a backward, including those that used no unit.
        self.reading.discard();
        self.phase = Phase::Idle;
        self.counts.finished += 1;
        self.uses.pass = None;
        self.uses.open.clear();
        self.early.end_backward();
        Ok(std::mem::take(&mut self.reductions.done))
    }

    /// Reduces the gradients that earlier backwards left for units that this step did not use: unreduced gradients, and
    /// reduced ones that wait in the shards.
    fn reduce_held(&mut self, root: &Root) -> Result<(), Error> {
        let gradients = &self.gradients;
        let waiting = gradients.held.keys().chain(gradients.partial.keys());
        let waiting: BTreeSet<usize> = waiting.copied().collect();
        for index in waiting {
            // An earlier operation in the order may have included these gradients.
            let waits = |unit: Arc<Unit>| self.gradients.wait_for(&unit, root.is_last());
            if root.unit(index).is_some_and(waits) {
                let operation = Operation::Reduce(index);
                self.advance(root, operation)?;
                let generation = self.copy_in_use(root, operation)?;
                let nothing = generation.unit.empty_slots();
                self.reduce(root, (&generation, NO_USE), nothing)?;
            }
        }
        Ok(())
    }
}
