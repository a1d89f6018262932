//! Issues operations in order: requested ones, prefetched ones, and those that only other ranks need.

use std::sync::{Arc, Weak};

use super::order::Ahead;
use super::state::{Phase, Progress, Root};
use crate::copies::Generation;
use crate::error::Error;
use crate::schedule::{Next, Operation, Step};

impl Progress {
    /// Issues the operations that precede `operation` in the order, then gathers `generation` and waits for it.
    pub(super) fn unshard(
        &mut self,
        root: &Root,
        operation: Operation,
        generation: &Arc<Generation>,
    ) -> Result<(), Error> {
        let position = loop {
            let position = self.advance(root, operation)?;
            match self.order.take_prefetched(position) {
                None if generation.life.is_sharded() => root.start_gather(generation, operation)?,
                None => {}
                Some(ahead) if ahead.is_for(generation) => {}
                Some(ahead) => {
                    // The other ranks already got their data from this gather; this rank requests it again.
                    ahead.discard();
                    let order = self.order.current();
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

    /// Issues all operations that precede `wanted` in the order, and returns the place of `wanted`, if the order has
    /// it.
    ///
    /// If the order lacks `wanted`, all ranks meet at its end and agree from there. They all reach the end of backward
    /// together, where the order is closed.
    pub(super) fn advance(
        &mut self,
        root: &Root,
        wanted: Operation,
    ) -> Result<Option<usize>, Error> {
        loop {
            let agreed = match self.order.current().next(wanted) {
                Next::Issue(step) => Some(step),
                Next::Agree => {
                    self.order.discard_prefetched();
                    let label = root.label(format_args!("agree on the next operation"));
                    let order = self.order.current();
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

    /// Synchronizes with the other ranks through the reduction at the end of the order. Closes the step if all ranks
    /// are at its end; otherwise returns the next operation that they agree on.
    fn meet(&mut self, root: &Root, wanted: Operation) -> Result<Option<Step>, Error> {
        self.order.discard_prefetched();
        let notes = self.reduce_whole(root, wanted)?;
        let (wishes, marks): (Vec<_>, Vec<_>) = notes
            .into_iter()
            .map(|note| (note.wish, note.marks))
            .unzip();
        let order = self.order.current();
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
                let ahead = self.order.take_prefetched(position);
                let forward = matches!(operation, Operation::UnshardForward(_));
                let generation = match &ahead {
                    Some(ahead) => ahead.generation.clone(),
                    None => self.copy_in_use(root, operation)?,
                };
                let unit = &generation.unit;
                let is_here = ahead.is_none() && !generation.life.is_sharded();
                if forward && unit.groups.neighbours.is_some() && !unit.keeps() && !is_here {
                    // The neighbours will need this rank's piece in backward.
                    if ahead.is_none() {
                        root.start_gather(&generation, operation)?;
                    }
                    root.finish_gather(&generation)?;
                    generation.reshard_after_forward()?;
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

    /// Returns the values of `operation`'s unit in the module copy that this pass uses. In backward, these are the
    /// values that its forward used.
    pub(super) fn copy_in_use(
        &self,
        root: &Root,
        operation: Operation,
    ) -> Result<Arc<Generation>, Error> {
        let index = operation.unit().unwrap_or_default();
        if !matches!(operation, Operation::UnshardForward(_))
            && let Some(used) = self.order.used.get(&index).and_then(Weak::upgrade)
        {
            return Ok(used);
        }
        let copies = root.copies(index);
        let copy = copies
            .as_ref()
            .and_then(|copies| copies.in_copy(self.order.copy));
        copy.ok_or_else(|| Error::NoCopy {
            rank: root.group.rank(),
            unit: copies.map_or_else(|| format!("number {index}"), |c| c.unit.label()),
        })
    }

    /// Starts the gathers that follow `position` in the order, up to the prefetch limit. This depends only on the
    /// order, so it is the same on all ranks.
    fn prefetch_after(&mut self, root: &Root, position: Option<usize>) -> Result<(), Error> {
        let Some(position) = position else {
            return Ok(());
        };
        let mut last = self
            .order
            .prefetched
            .back()
            .map_or(position, |a| a.position);
        while self.order.prefetched.len() < root.prefetch {
            let order = self.order.current();
            let Some((next, operation)) = order.following_unshard(position, last) else {
                break;
            };
            let generation = self.copy_in_use(root, operation)?;
            if generation.unit.hooks.gather.is_some() {
                // A hook blocks, so an early gather would only hold memory. This, too, depends only on the order.
                break;
            }
            let is_joined = !generation.life.is_sharded();
            if is_joined {
                drop(root.start_join(&generation, operation)?)
            } else {
                root.start_gather(&generation, operation)?
            }
            self.order.prefetched.push_back(Ahead {
                position: next,
                generation,
                is_joined,
            });
            last = next;
        }
        Ok(())
    }
}
