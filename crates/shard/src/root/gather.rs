//! Gathers: in order, ahead of their use, or for other ranks only.

use std::sync::{Arc, Weak};

use burn_fsdp_collectives::{Label, Part, Partition, Pending, ProcessGroup, Received};

use super::{Phase, Progress, Root};
use crate::copies::{Generation, UnitState};
use crate::error::Error;
use crate::pins::{Mark, Marked};
use crate::schedule::{Next, Operation, Step};
use crate::transport;

/// A gather that was started ahead of its use.
pub(super) struct Ahead {
    /// Its place in the order.
    position: usize,
    /// The values that are gathered.
    generation: Arc<Generation>,
    /// Whether it was started for the other ranks' sake alone: this rank had the full parameters,
    /// or was getting them, when its turn came.
    is_joined: bool,
}

impl Ahead {
    /// Lets go of what has been gathered, or is being.
    fn discard(self) {
        if !self.is_joined && !self.generation.life.is_unsharded() {
            self.generation.life.drop_full();
        }
    }

    /// Whether the full parameters of `generation` are on their way by it.
    fn is_for(&self, generation: &Arc<Generation>) -> bool {
        !self.is_joined && Arc::ptr_eq(&self.generation, generation)
    }
}

impl Progress {
    /// Issues what comes before `operation` in the order, then makes sure that `generation` is
    /// being gathered.
    pub(super) fn unshard(
        &mut self,
        root: &Root,
        operation: Operation,
        generation: &Arc<Generation>,
    ) -> Result<(), Error> {
        let position = loop {
            let position = self.advance(root, operation)?;
            match self.take_prefetched(position) {
                None if generation.life.is_sharded() => root.start_gather(generation, operation)?,
                None => {}
                Some(ahead) if ahead.is_for(generation) => {}
                Some(ahead) => {
                    // The other ranks got what they need of it; this one asks again.
                    ahead.discard();
                    let order = self.schedules.current();
                    position.into_iter().for_each(|place| order.mislead(place));
                    self.prefetch_after(root, position)?;
                    continue;
                }
            }
            break position;
        };
        self.prefetch_after(root, position)?;
        let marks = root.finish_gather(generation)?;
        if self.phase == Phase::Forward && !generation.unit.keeps() {
            let unit = &generation.unit;
            let (name, bytes) = (unit.label(), unit.gathered_bytes());
            self.watch.unsharded(name, bytes, marks);
        }
        Ok(())
    }

    /// Issues everything in the order up to `wanted`, and returns the place of that.
    ///
    /// Where the order does not hold it, all ranks meet at its end and agree from there on. The end
    /// of backward is reached by all of them together; the order is closed then.
    pub(super) fn advance(
        &mut self,
        root: &Root,
        wanted: Operation,
    ) -> Result<Option<usize>, Error> {
        loop {
            let agreed = match self.schedules.current().next(wanted) {
                Next::Issue(step) => Some(step),
                Next::Agree => {
                    self.discard_prefetched();
                    let label = root.label(format_args!("agree on the next operation"));
                    let order = self.schedules.current();
                    let wishes = order.ask_all(wanted, &root.group, label)?;
                    order.agree(wanted, &wishes)
                }
                Next::Meet => None,
            };
            let step = match agreed {
                Some(step) => step,
                None => match self.meet(root, wanted)? {
                    Some(step) => step,
                    None => return Ok(None),
                },
            };
            if step.wanted {
                return Ok(step.position);
            }
            self.fill_in(root, step.operation, step.position)?;
        }
    }

    /// Meets the other ranks where the order ends, with what is reduced there. Closes the step if
    /// all are at its end; otherwise returns the operation that they agree on.
    fn meet(&mut self, root: &Root, wanted: Operation) -> Result<Option<Step>, Error> {
        self.discard_prefetched();
        let notes = self.reduce_whole(root, wanted)?;
        let (wishes, marks): (Vec<_>, Vec<_>) = notes
            .into_iter()
            .map(|note| (note.wish, note.marks))
            .unzip();
        let order = self.schedules.current();
        let step = order.agree(wanted, &wishes);
        if step.is_none() {
            order.close(&marks);
        }
        Ok(step)
    }

    /// Takes part in an operation that only other ranks need.
    fn fill_in(
        &mut self,
        root: &Root,
        operation: Operation,
        position: Option<usize>,
    ) -> Result<(), Error> {
        match operation {
            Operation::UnshardForward(_) | Operation::UnshardBackward(_) => {
                let ahead = self.take_prefetched(position);
                let forward = matches!(operation, Operation::UnshardForward(_));
                let generation = match &ahead {
                    Some(ahead) => ahead.generation.clone(),
                    None => self.copy_in_use(root, operation)?,
                };
                let unit = &generation.unit;
                let is_here = ahead.is_none() && !generation.life.is_sharded();
                if forward && unit.groups.neighbours.is_some() && !unit.keeps() && !is_here {
                    // The neighbours will want this rank's piece in backward.
                    if ahead.is_none() {
                        root.start_gather(&generation, operation)?;
                    }
                    root.finish_gather(&generation)?;
                    generation.reshard_after_forward();
                } else {
                    match ahead {
                        Some(ahead) => ahead.discard(),
                        None => root.join_gather(&generation, operation)?,
                    }
                }
                self.prefetch_after(root, position)
            }
            Operation::Reduce(_) => {
                let generation = self.copy_in_use(root, operation)?;
                let nothing = generation.unit.empty_slots();
                self.reduce(root, &generation, nothing)
            }
            Operation::Finish => unreachable!("the end of backward comes last on every rank"),
        }
    }

    /// The values of the unit of `operation` in the copy of the module that this pass uses: for
    /// backward those that its forward had.
    pub(super) fn copy_in_use(
        &self,
        root: &Root,
        operation: Operation,
    ) -> Result<Arc<Generation>, Error> {
        let index = operation.unit().unwrap_or_default();
        if !matches!(operation, Operation::UnshardForward(_))
            && let Some(used) = self.used.get(&index).and_then(Weak::upgrade)
        {
            return Ok(used);
        }
        let copies = root.copies(index);
        let copy = copies.as_ref().and_then(|copies| copies.in_copy(self.copy));
        copy.ok_or_else(|| Error::NoCopy {
            rank: root.group.rank(),
            unit: copies.map_or_else(|| format!("number {index}"), |c| c.unit.label()),
        })
    }

    fn take_prefetched(&mut self, position: Option<usize>) -> Option<Ahead> {
        let position = position?;
        let first = self.prefetched.front()?;
        match first.position == position {
            true => self.prefetched.pop_front(),
            false => None,
        }
    }

    fn discard_prefetched(&mut self) {
        std::mem::take(&mut self.prefetched)
            .into_iter()
            .for_each(Ahead::discard);
    }

    /// Starts the gathers that follow `position`, up to the limit. The decision depends on the
    /// order alone, so all ranks take the same.
    fn prefetch_after(&mut self, root: &Root, position: Option<usize>) -> Result<(), Error> {
        let Some(position) = position else {
            return Ok(());
        };
        let mut last = self.prefetched.back().map_or(position, |a| a.position);
        while self.prefetched.len() < root.prefetch {
            let order = self.schedules.current();
            let Some((next, operation)) = order.following_unshard(position, last) else {
                break;
            };
            let generation = self.copy_in_use(root, operation)?;
            let is_joined = !generation.life.is_sharded();
            match is_joined {
                true => drop(root.start_join(&generation, operation)?),
                false => root.start_gather(&generation, operation)?,
            }
            self.prefetched.push_back(Ahead {
                position: next,
                generation,
                is_joined,
            });
            last = next;
        }
        Ok(())
    }
}

impl Root {
    /// Starts a gather that the program asks for itself, outside of the order.
    pub(crate) fn unshard_by_hand(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        self.step(|_| match generation.life.is_sharded() {
            true => self.start_gather(
                generation,
                Operation::UnshardForward(generation.unit.position()),
            ),
            false => Ok(()),
        })
    }

    /// Waits for it.
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
            // The shard is the whole: nothing to copy, but the same operation in the same order.
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

    /// As [`join_gather`](Self::join_gather), without waiting.
    fn start_join(
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

    /// Waits until the full parameters are there.
    ///
    /// Returns the buffers now filled, as marks that live as long as they do.
    pub(super) fn finish_gather(&self, generation: &Generation) -> Result<Vec<Mark>, Error> {
        let unit = &generation.unit;
        let marks = generation.life.fill(|pending| {
            let mut marks = Vec::new();
            let mut full = unit.empty_slots();
            let Some(pending) = pending else {
                for slot in unit.gathered_slots() {
                    full[slot] = Some(generation.held_there(slot));
                }
                return Ok((full, marks));
            };
            let received = pending.wait()?;
            for (slot, buffer) in unit.gathered_slots().zip(received.buffers) {
                let (marked, mark) = Marked::new(buffer);
                marks.push(mark);
                let device = generation.device(slot).without_autodiff();
                let dtype = unit.slots[slot].elements.compute.dtype;
                full[slot] = Some(transport::tensor(marked, dtype, &device));
            }
            Ok((full, marks))
        })?;
        // Gathered before, or nothing to gather.
        Ok(marks.unwrap_or_default())
    }

    /// The full value of a slot, flat and plain. The unit must be unsharded.
    pub(super) fn full(
        &self,
        generation: &Generation,
        slot: usize,
    ) -> Result<burn::tensor::Tensor<1>, Error> {
        let unit = &generation.unit;
        if !unit.slots[slot].is_gathered() {
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

/// What this rank publishes for a gather, and to whom: its piece among the neighbours if forward
/// has left one, otherwise its shard.
fn sources(
    generation: &Generation,
    operation: Operation,
) -> Result<(&ProcessGroup, Vec<Part>), Error> {
    let unit = &generation.unit;
    match (&unit.groups.neighbours, generation.pieces(), operation) {
        (Some(neighbours), Some(pieces), Operation::UnshardBackward(_)) => {
            let parts = unit.gathered_slots().map(|index| {
                let slot = &unit.slots[index];
                let piece = pieces[index].clone().expect("gathered slots have pieces");
                Ok(Part {
                    source: transport::source(piece, None),
                    partition: Partition::flat(slot.partition.num_elements(), neighbours.size())?,
                    element: slot.elements.compute.wire,
                })
            });
            let parts: Result<_, Error> = parts.collect();
            Ok((neighbours, parts?))
        }
        _ => Ok((&unit.groups.shard, generation.shards())),
    }
}
