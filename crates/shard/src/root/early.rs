//! Units that the optimizer steps before backward ends.
//!
//! If the program calls [`backward_and_step`](crate::backward_and_step), the root holds its optimizer and module as
//! [`Steps`]. A unit's reduction is its last if the rest of the recorded order has no operation of the unit, and the
//! reduction's notes announce no other. Both are the same on all ranks. Other gradients wait for the end of backward.

use std::sync::Arc;

use super::audited::GivenGradient;
use super::state::{Phase, Progress, Root};
use super::steps::{Complete, Steps};
use crate::audit::announce_more;
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::op::Reduced;
use crate::unit::Unit;

impl Root {
    /// Sets the module and the optimizer that step units in the next backward; `None` for a backward without steps.
    pub(crate) fn step_along(&self, steps: Option<Arc<dyn Steps>>) {
        self.progress().early.steps = steps;
    }

    /// Returns the maximum bytes of reduced gradients that existed together during a backward.
    pub(crate) fn gradients_peak(&self) -> usize {
        self.progress().reductions.counted.peak_bytes()
    }

    pub(crate) fn reset_gradients_peak(&self) {
        self.progress().reductions.counted.reset_peak();
    }

    /// Returns true if the next backward reduces the gradients of `unit` over all ranks and returns them.
    pub(crate) fn returns_gradients_of(&self, unit: &Unit) -> bool {
        unit.syncs() && unit.crosses() && self.is_last()
    }

    /// Lets the optimizer step the units that have become complete. The state of the step is not locked meanwhile.
    pub(crate) fn step_complete_units(&self) -> Result<(), Error> {
        let (steps, complete) = {
            let early = &mut self.progress().early;
            (early.steps.clone(), std::mem::take(&mut early.complete))
        };
        let Some(steps) = steps else {
            return Ok(());
        };
        for complete in complete {
            let Complete {
                generation,
                slots,
                gradients,
                accounts,
            } = complete;
            let leaves: Vec<_> = gradients.iter().map(|reduced| reduced.node).collect();
            steps.step(&self.trial, &generation, &slots, gradients)?;
            drop(accounts);
            self.handed_over(&leaves);
            // Burn's graph, or the rest of backward, may hold the generation for longer.
            Copies::of(&generation).free_replaced(&generation, &slots);
        }
        Ok(())
    }
}

impl Progress {
    /// Returns the note of a unit's reduction: for each gradient, whether this rank has it, and its tag in an audited
    /// step; and whether a rank needs another reduction of the unit in this backward.
    pub(super) fn unit_note(&mut self, unit: &Unit, given: &[GivenGradient<'_>]) -> Vec<u8> {
        let mut note = self.audited.note(given);
        // A rank in its forward, which takes part only for the other ranks, does not know its uses yet.
        let is_known = self.phase == Phase::Backward;
        if !is_known || self.uses.awaits(unit) || self.early.waiting.contains(&unit.position()) {
            announce_more(&mut note);
        }
        note
    }

    /// Passes on the gradients that the reductions of a unit have summed over all ranks: to the optimizer if they are
    /// complete, otherwise to the end of backward.
    pub(super) fn deliver(
        &mut self,
        generation: &Arc<Generation>,
        slots: &[usize],
        gradients: Vec<Reduced>,
    ) -> Result<(), Error> {
        let position = generation.unit.position();
        if self.early.stepped.contains(&position) && !gradients.is_empty() {
            return Err(Error::State {
                unit: generation.unit.label(),
                expected: "without further gradients in this backward".to_owned(),
                got: "stepped before its last gradient arrived".to_owned(),
                advice: "call `backward`, and step the optimizer after it",
            });
        }
        if !self.is_complete(generation, slots) {
            self.early.waiting.insert(position);
            self.arrive(gradients);
            return Ok(());
        }
        self.early.stepped.insert(position);
        // If only other ranks need the unit from now on, its new values take part.
        self.order.used.remove(&position);
        self.early.complete.push(Complete {
            generation: generation.clone(),
            slots: slots.to_vec(),
            accounts: self.reductions.account(&gradients),
            gradients,
        });
        Ok(())
    }

    /// Returns true if no rank will compute another gradient of the unit or use its values in this backward.
    fn is_complete(&self, generation: &Generation, slots: &[usize]) -> bool {
        let Some(steps) = &self.early.steps else {
            return false;
        };
        let position = generation.unit.position();
        let is_known = |&slot: &usize| generation.node(slot).is_some_and(|leaf| steps.knows(leaf));
        !self.early.waiting.contains(&position)
            && self.order.schedules.last().is_done_with(position)
            && slots.iter().all(is_known)
    }
}
