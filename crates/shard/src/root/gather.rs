//! Gathers: in order, ahead of their use, or for other ranks only.

use std::sync::Arc;

use burn_fsdp_collectives::{Label, Part, Partition, ProcessGroup};

use super::{Phase, Progress, Root};
use crate::error::Error;
use crate::generation::{Generation, State};
use crate::handle::UnitState;
use crate::memory::Mark;
use crate::schedule::Operation;
use crate::transport::{self, Marked};

impl Progress {
    /// Issues what comes before `operation` in the order, then makes sure that `generation` is
    /// being gathered.
    pub(super) fn unshard(
        &mut self,
        root: &Root,
        operation: Operation,
        generation: &Arc<Generation>,
    ) -> Result<(), Error> {
        let position = self.advance(root, operation)?;
        let ahead = self.take_prefetched(position);
        if generation.is_sharded() {
            if ahead {
                // Another copy of the module was prefetched than the one now used.
                self.discard(root, operation);
            }
            root.start_gather(generation, operation)?;
        }
        self.prefetch_after(root, position)?;
        let marks = root.finish_gather(generation)?;
        if self.phase == Phase::Forward && !generation.unit.keeps() {
            self.watch.unsharded(&generation.unit, marks);
        }
        Ok(())
    }

    /// Issues everything in the order up to `wanted`, and returns the place of that.
    pub(super) fn advance(
        &mut self,
        root: &Root,
        wanted: Operation,
    ) -> Result<Option<usize>, Error> {
        loop {
            let label = || root.label(format_args!("agree on the next operation"));
            let step = self.schedules.current().next(wanted, &root.group, label)?;
            if step.position.is_none() {
                // The recorded order has come to its end, here or for good.
                self.discard_prefetched(root);
            }
            if step.wanted {
                return Ok(step.position);
            }
            self.fill_in(root, step.operation, step.position)?;
        }
    }

    /// Takes part in an operation that only other ranks need.
    fn fill_in(
        &mut self,
        root: &Root,
        operation: Operation,
        position: Option<usize>,
    ) -> Result<(), Error> {
        match operation {
            Operation::UnshardForward(index) | Operation::UnshardBackward(index) => {
                let generation = self.copy_in_use(root, index)?;
                let is_ahead = self.take_prefetched(position);
                let forward = matches!(operation, Operation::UnshardForward(_));
                if forward && generation.unit.groups.neighbours.is_some() {
                    // The neighbours will want this rank's piece in backward.
                    if !is_ahead {
                        root.start_gather(&generation, operation)?;
                    }
                    root.finish_gather(&generation)?;
                    generation.reshard_after_forward();
                } else if is_ahead {
                    self.discard(root, operation);
                } else {
                    root.join_gather(&generation, operation)?;
                }
                self.prefetch_after(root, position)
            }
            Operation::Reduce(index) => {
                let generation = self.copy_in_use(root, index)?;
                let nothing = generation.unit.places();
                self.reduce(root, &generation, nothing)
            }
            Operation::Finish => unreachable!("the end of backward comes last on every rank"),
        }
    }

    /// The values of unit `index` in the copy of the module that this pass uses.
    pub(super) fn copy_in_use(&self, root: &Root, index: usize) -> Result<Arc<Generation>, Error> {
        let unit = root.unit(index);
        let copy = unit.as_ref().and_then(|u| u.generation_of(self.epoch));
        copy.ok_or_else(|| Error::NoCopy {
            rank: root.group.rank(),
            unit: unit.map_or_else(|| format!("number {index}"), |u| u.label()),
        })
    }

    fn take_prefetched(&mut self, position: Option<usize>) -> bool {
        let first = self.prefetched.front().map(|&(place, _)| place);
        let ahead = position.is_some() && first == position;
        if ahead {
            self.prefetched.pop_front();
        }
        ahead
    }

    fn discard_prefetched(&mut self, root: &Root) {
        for (_, operation) in std::mem::take(&mut self.prefetched) {
            self.discard(root, operation);
        }
    }

    /// Drops what was gathered ahead for `operation`.
    fn discard(&self, root: &Root, operation: Operation) {
        if let Operation::UnshardForward(index) | Operation::UnshardBackward(index) = operation
            && let Ok(generation) = self.copy_in_use(root, index)
        {
            *generation.state.lock() = State::Sharded;
        }
    }

    /// Starts the gathers that follow `position`, up to the limit. The decision depends on the
    /// order alone, so all ranks take the same.
    fn prefetch_after(&mut self, root: &Root, position: Option<usize>) -> Result<(), Error> {
        let Some(position) = position else {
            return Ok(());
        };
        let mut last = self.prefetched.back().map_or(position, |&(place, _)| place);
        while self.prefetched.len() < root.prefetch {
            let Some((next, operation)) = self.schedules.current().following_unshard(last) else {
                break;
            };
            let (Operation::UnshardForward(index) | Operation::UnshardBackward(index)) = operation
            else {
                break;
            };
            let Ok(generation) = self.copy_in_use(root, index) else {
                break;
            };
            if !generation.is_sharded() {
                break;
            }
            root.start_gather(&generation, operation)?;
            self.prefetched.push_back((next, operation));
            last = next;
        }
        Ok(())
    }
}

impl Root {
    /// Starts a gather that the program asks for itself, outside of the order.
    pub(crate) fn unshard_by_hand(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        self.step(|_| match generation.is_sharded() {
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
        if unit.group.size() == 1 {
            // The shard is the whole: nothing to copy, but the same operation in the same order.
            self.join_gather(generation, operation)?;
            *generation.state.lock() = State::Gathering(None);
            return Ok(());
        }
        let into = unit
            .gathered_slots()
            .map(|slot| self.pool.take(unit.slots[slot].unsharded_bytes()))
            .collect();
        let (group, parts) = sources(generation, operation)?;
        let label = self.gather_label(generation, operation);
        let pending = group.start_all_gather(label, Vec::new(), parts, into)?;
        *generation.state.lock() = State::Gathering(Some(pending));
        Ok(())
    }

    /// Lets the other ranks read this rank's shards, and receives nothing.
    pub(super) fn join_gather(
        &self,
        generation: &Generation,
        operation: Operation,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        if unit.is_gathered() {
            let (group, parts) = sources(generation, operation)?;
            let label = self.gather_label(generation, operation);
            group.join_all_gather(label, Vec::new(), parts)?.wait()?;
        }
        Ok(())
    }

    /// Waits until the full parameters are there.
    ///
    /// Returns the buffers now filled, as marks that live as long as they do.
    pub(super) fn finish_gather(&self, generation: &Generation) -> Result<Vec<Mark>, Error> {
        let unit = &generation.unit;
        let mut state = generation.state.lock();
        let pending = match std::mem::take(&mut *state) {
            State::Gathering(pending) => pending,
            // Gathered before, or nothing to gather.
            other => {
                *state = other;
                return Ok(Vec::new());
            }
        };
        let mut marks = Vec::new();
        let mut full = unit.places();
        let Some(pending) = pending else {
            for slot in unit.gathered_slots() {
                full[slot] = Some(generation.held_there(slot));
            }
            *state = State::Unsharded(full);
            return Ok(marks);
        };
        let received = pending.wait()?;
        for (slot, buffer) in unit.gathered_slots().zip(received.buffers) {
            let life = Arc::new(());
            marks.push(Mark {
                bytes: buffer.len(),
                life: Arc::downgrade(&life),
            });
            let marked = Marked {
                buffer,
                _life: life,
            };
            let device = generation.device(slot).without_autodiff();
            let dtype = unit.slots[slot].compute;
            full[slot] = Some(transport::tensor(marked, dtype, &device));
        }
        *state = State::Unsharded(full);
        Ok(marks)
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
        if let State::Unsharded(full) = &*generation.state.lock() {
            return Ok(full[slot].clone().expect("gathered slots are filled"));
        }
        Err(Error::State {
            unit: unit.label(),
            expected: UnitState::Unsharded.to_string(),
            got: generation.unit_state().to_string(),
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
            "{} unshard, {direction},",
            generation.unit.label()
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
    let pieces = generation.pieces.lock();
    match (&unit.groups.neighbours, &*pieces, operation) {
        (Some(neighbours), Some(pieces), Operation::UnshardBackward(_)) => {
            let parts = unit.gathered_slots().map(|index| {
                let slot = &unit.slots[index];
                let piece = pieces[index].clone().expect("gathered slots have pieces");
                Ok(Part {
                    source: transport::source(piece, None),
                    partition: Partition::flat(slot.partition.num_elements(), neighbours.size())?,
                    element: slot.compute_element,
                })
            });
            let parts: Result<_, Error> = parts.collect();
            Ok((neighbours, parts?))
        }
        _ => Ok((&unit.group, unit.shards(generation))),
    }
}
