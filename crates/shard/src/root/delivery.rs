//! Reduced gradients on their way to the optimizer.

use burn::tensor::{Shape, Tensor};
use burn_fsdp_collectives::{Label, RestKind};

use super::arrival::{Arrived, SUM};
use super::audited::Station;
use super::state::{Progress, Root};
use crate::copies::Generation;
use crate::error::Error;
use crate::files;
use crate::op::Reduced;
use crate::seal;
use crate::slot::Slots;

impl Progress {
    /// Stores reduced gradients until they go into Burn's `Gradients`.
    pub(super) fn arrive(&mut self, arrived: Vec<Reduced>) {
        let accounts = self.reductions.account(&arrived);
        self.reductions.accounts.extend(accounts);
        self.reductions.done.extend(arrived);
    }

    /// Returns a reduced gradient of a slot as a gradient of its parameter's leaf; `None` if the parameter is frozen, or
    /// another rank owns it. The gradient of a shard in a file is written to one. Until an optimizer reads the gradient,
    /// it waits with its seal.
    pub(super) fn reduced(
        &mut self,
        root: &Root,
        (generation, index): (&Generation, usize),
        from: Station,
        gradient: Tensor<1>,
    ) -> Result<Option<Reduced>, Error> {
        let unit = &generation.unit;
        let kind = match from {
            Station::Sum => RestKind::Sum,
            _ => RestKind::Arrived,
        };
        let sealed = unit.seals.take(seal::place(index, kind));
        let slot = &unit.slots[index];
        let rank = unit.groups.shard.rank();
        let node = generation.node(index);
        let Some(node) = node.filter(|_| !slot.is_elsewhere(rank)) else {
            self.audited.dropped(unit, index, from);
            return Ok(None);
        };
        let gradient = unit.in_file(index, files::GRADIENT, gradient)?;
        self.audited.passes(unit, index, from, node);
        let of = (self.counts.finished, node);
        self.waiting.add(&root.group, of, &gradient, sealed)?;
        Ok(Some(Reduced {
            node,
            shape: Shape::from(slot.shown_shape(rank)),
            gradient,
        }))
    }

    /// Returns the gradients of `leaves` as they arrived, except those that no rank has, and those of parameters that
    /// another rank owns.
    pub(super) fn reduced_of(
        &mut self,
        root: &Root,
        generation: &Generation,
        slots: &[usize],
        mut arrived: Arrived,
    ) -> Result<Vec<Reduced>, Error> {
        let mut gradients = Vec::with_capacity(slots.len());
        for &slot in slots {
            if let Some(sum) = arrived.next(&mut self.audited, generation, slot) {
                let of = (generation, slot);
                gradients.extend(self.reduced(root, of, Station::Arrived, sum)?);
            }
        }
        Ok(gradients)
    }

    /// Returns the sums that wait for a unit's slots as gradients of their leaves, like [`reduced`](Self::reduced).
    pub(super) fn reduced_sums(
        &mut self,
        root: &Root,
        generation: &Generation,
        slots: &[usize],
        waiting: &mut Slots<Tensor<1>>,
    ) -> Result<Vec<Reduced>, Error> {
        let mut gradients = Vec::with_capacity(slots.len());
        for &slot in slots {
            if let Some(sum) = waiting[slot].take() {
                gradients.extend(self.reduced(root, (generation, slot), Station::Sum, sum)?);
            }
        }
        Ok(gradients)
    }

    /// Returns the sum of the gradient that waits for a slot and the one that has arrived, either of which may be
    /// missing. It waits in turn.
    pub(super) fn added(
        &mut self,
        root: &Root,
        (generation, slot): (&Generation, usize),
        earlier: Option<Tensor<1>>,
        arrived: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, Error> {
        let Some(arrived) = arrived else {
            return Ok(earlier);
        };
        let seals = &generation.unit.seals;
        let [at, from] = [RestKind::Sum, RestKind::Arrived].map(|kind| seal::place(slot, kind));
        self.audited
            .added(&generation.unit, slot, Station::Arrived, Station::Sum);
        let Some(earlier) = earlier else {
            seals.set(at, seals.take(from));
            return Ok(Some(arrived));
        };
        seal::check(seals, at, &earlier)?;
        seal::check(seals, from, &arrived)?;
        let sum = earlier + arrived;
        let what = || Label::from(generation.named_as(SUM, slot));
        seals.keep(at, seal::seal(&root.group, &sum), what);
        Ok(Some(sum))
    }
}
