//! A gather: starting it, joining it for other ranks, and waiting for it.

use std::sync::Arc;

use burn_fsdp_collectives::{At, Label, Part, Partition, Pending, ProcessGroup, Received};

use super::state::Root;
use crate::copies::{Full, Generation, UnitState};
use crate::device::is_host;
use crate::error::Error;
use crate::pins::{Mark, Marked};
use crate::schedule::Operation;
use crate::seal;

impl Root {
    /// Starts a gather that the program itself asks for, outside of the order.
    pub(crate) fn unshard_by_hand(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        self.step(|progress| {
            if !generation.life.is_sharded() {
                return Ok(());
            }
            progress.meet_others(generation)?;
            let operation = Operation::UnshardForward(generation.unit.position());
            self.start_gather(generation, operation)
        })
    }

    /// Waits for a gather that the program itself has asked for.
    pub(crate) fn await_by_hand(&self, generation: &Generation) -> Result<(), Error> {
        self.step(|_| self.finish_gather(generation).map(drop))
    }

    /// Publishes this rank's shards and allocates the full parameters.
    pub(super) fn start_gather(
        &self,
        generation: &Generation,
        operation: Operation,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        if !unit.is_gathered() {
            return Ok(());
        }
        if unit.groups.shard.size() == 1 {
            // The shard is the whole parameter: nothing to copy, but the same operation in the same order.
            self.join_gather(generation, operation)?;
            generation.life.begin_gather(None);
            return Ok(());
        }
        let into = unit
            .gathered_slots()
            .map(|slot| self.pool.take(unit.slots[slot].unsharded_bytes()))
            .collect();
        let (group, parts) = sources(generation, operation)?;
        let label = self.gather_label(generation, operation);
        let pending = group.start_all_gather(label, Vec::new(), parts, into)?;
        generation.life.begin_gather(Some(pending));
        Ok(())
    }

    /// Lets the other ranks read this rank's shards, and receives nothing.
    pub(super) fn join_gather(
        &self,
        generation: &Generation,
        operation: Operation,
    ) -> Result<(), Error> {
        if let Some(pending) = self.start_join(generation, operation)? {
            pending.wait()?;
        }
        Ok(())
    }

    /// Starts the operation of [`join_gather`](Self::join_gather), without waiting.
    pub(super) fn start_join(
        &self,
        generation: &Generation,
        operation: Operation,
    ) -> Result<Option<Pending<Received>>, Error> {
        if !generation.unit.is_gathered() {
            return Ok(None);
        }
        let (group, parts) = sources(generation, operation)?;
        let label = self.gather_label(generation, operation);
        Ok(Some(group.join_all_gather(label, Vec::new(), parts)?))
    }

    /// Waits until the full parameters exist.
    ///
    /// Returns the buffers now filled, as marks that live as long as they do.
    pub(super) fn finish_gather(&self, generation: &Generation) -> Result<Vec<Mark>, Error> {
        let unit = &generation.unit;
        let marks = generation.life.fill(|pending| {
            let mut marks = Vec::new();
            let mut full = Full {
                tensors: unit.empty_slots(),
                seals: unit.empty_slots(),
            };
            if let Some(slot) = unit.gathered_slots().next() {
                unit.staging.make_room(&generation.device(slot));
            }
            let Some(pending) = pending else {
                for slot in unit.gathered_slots() {
                    full.tensors[slot] = Some(generation.held_there(slot));
                }
                return Ok((full, marks));
            };
            let received = pending.wait()?;
            let mut seals = received.seals.into_iter();
            for (slot, buffer) in unit.gathered_slots().zip(received.buffers) {
                let seal = seals.next();
                let (marked, mark) = Marked::new(buffer);
                marks.push(mark);
                let device = generation.device(slot).without_autodiff();
                let dtype = unit.slots[slot].elements.compute.dtype;
                let mut tensor = unit.staging.tensor(marked, dtype, &device);
                seal::flip_if_told(&self.group, At::Weight, &mut tensor);
                full.tensors[slot] = Some(tensor);
                full.seals[slot] = seal.filter(|_| is_host(&device));
            }
            Ok((full, marks))
        })?;
        // It was gathered before, or there is nothing to gather.
        Ok(marks.unwrap_or_default())
    }

    /// Returns the full value of a slot, flat and plain. The unit must be unsharded.
    pub(super) fn full(
        &self,
        generation: &Generation,
        slot: usize,
    ) -> Result<burn::tensor::Tensor<1>, Error> {
        let unit = &generation.unit;
        if !unit.slots[slot].is_gathered() {
            generation.flip_if_told(slot);
            generation.check(slot)?;
            return Ok(generation.held_there(slot));
        }
        if let Some(full) = generation.life.full(slot) {
            return Ok(full);
        }
        Err(Error::State {
            unit: unit.label(),
            expected: UnitState::Unsharded.to_string(),
            got: generation.life.state().to_string(),
            advice: "it was resharded in the middle of a use; run the forward again, and `reshard` \
                     only what no forward is using",
        })
    }

    /// Returns the tensor with which the model computes for a slot, flat and plain: the full value, plus its adapter's
    /// part. The unit must be unsharded.
    pub(super) fn weight(
        &self,
        generation: &Generation,
        slot: usize,
    ) -> Result<burn::tensor::Tensor<1>, Error> {
        let full = self.full(generation, slot)?;
        let Some(adapter) = &generation.unit.slots[slot].adapter else {
            return Ok(full);
        };
        let a = self.full(generation, adapter.a)?;
        let b = self.full(generation, adapter.b)?;
        Ok(adapter.applied(full, a, b))
    }

    fn gather_label(&self, generation: &Generation, operation: Operation) -> Label {
        let direction = match operation {
            Operation::UnshardBackward(_) => "backward",
            _ => "forward",
        };
        self.label(format_args!(
            "{} unshard, {direction}, values {:08x},",
            generation.unit.label(),
            generation.fingerprint()
        ))
    }
}

/// Returns the parts that this rank publishes for a gather, and the group that reads them. For a backward
/// these are its pieces among the neighbours, if forward has left them; otherwise they are its shards.
fn sources(
    generation: &Generation,
    operation: Operation,
) -> Result<(&ProcessGroup, Vec<Part>), Error> {
    let unit = &generation.unit;
    match (&unit.groups.neighbours, generation.pieces(), operation) {
        (Some(neighbours), Some(pieces), Operation::UnshardBackward(_)) => {
            let parts = unit.gathered_slots().map(|index| {
                let slot = &unit.slots[index];
                let (piece, seal) = pieces[index].clone().expect("gathered slots have pieces");
                let named = || Label::from(generation.named_as("the piece", index));
                Ok(Part {
                    source: unit.staging.source(piece, None).sealed(seal, named),
                    partition: Partition::flat(slot.partition.num_elements(), neighbours.size())?,
                    element: slot.elements.compute.wire,
                })
            });
            let parts: Result<_, Error> = parts.collect();
            Ok((neighbours, parts?))
        }
        _ => Ok((&unit.groups.shard, generation.shards()?)),
    }
}
