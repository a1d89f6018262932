//! Issues operations in order: requested ones, prefetched ones, and those that only other ranks need.

use std::sync::{Arc, Weak};

use super::backward::NO_USE;
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
            match self.order.take_prefetched(operation, position) {
                None if generation.life.is_sharded() => root.start_gather(generation, operation)?,
                None => {}
                Some(ahead) if ahead.is_for(generation) => {}
                Some(ahead) => {
                    // The other ranks already got their data from this gather; this rank requests it again.
                    ahead.discard();
                    let order = self.order.current();
                    position.into_iter().for_each(|place| order.mislead(place));
                    self.prefetch_after(root, operation, position)?;
                    continue;
                }
            }
            break position;
        };
        self.prefetch_after(root, operation, position)?;
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
                    // All ranks leave the recorded order here. What they agreed to prefetch stays.
                    self.order
                        .discard_prefetched_if(|ahead| ahead.position.is_some());
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
            if !matches!(step.operation, Operation::UnshardForward(_)) {
                // Forward did not use them.
                let is_left = |ahead: &Ahead| {
                    ahead.position.is_none()
                        && matches!(ahead.operation, Operation::UnshardForward(_))
                };
                self.order.discard_prefetched_if(is_left);
            }
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
                let ahead = self.order.take_prefetched(operation, position);
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
                self.prefetch_after(root, operation, position)
            }
            Operation::Reduce(_) => {
                let generation = self.copy_in_use(root, operation)?;
                let nothing = generation.unit.empty_slots();
                self.reduce(root, (&generation, NO_USE), nothing)
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

    /// Starts the gathers that follow `operation` at `position`: those of the units that the program listed for its unit,
    /// or else the next ones in the order, up to the prefetch limit. This depends only on the order and on the lists, so
    /// it is the same on all ranks.
    fn prefetch_after(
        &mut self,
        root: &Root,
        operation: Operation,
        position: Option<usize>,
    ) -> Result<(), Error> {
        let listed = operation
            .unit()
            .and_then(|unit| root.unit(unit)?.listed_after(operation));
        match (listed, position) {
            (Some(listed), _) => self.prefetch_listed(root, &listed, position),
            (None, Some(position)) => self.prefetch_in_order(root, position),
            // The order is not known yet. Backward will probably reverse the forward, on which all ranks have agreed.
            (None, None) => {
                let next = self.order.current().reversed_after(operation);
                let is_gathered = |next: &Operation| {
                    let unit = next.unit().and_then(|unit| root.unit(unit));
                    unit.is_some_and(|unit| !unit.keeps())
                };
                let room = root.prefetch.saturating_sub(self.order.prefetched.len());
                let next: Vec<_> = next.into_iter().filter(is_gathered).take(room).collect();
                self.prefetch_listed(root, &next, None)
            }
        }
    }

    fn prefetch_in_order(&mut self, root: &Root, position: usize) -> Result<(), Error> {
        let last = self.order.prefetched.back();
        let mut last = last.and_then(|ahead| ahead.position).unwrap_or(position);
        while self.order.prefetched.len() < root.prefetch {
            let order = self.order.current();
            let Some((next, operation)) = order.following_unshard(position, last) else {
                break;
            };
            self.start_ahead(root, operation, Some(next))?;
            last = next;
        }
        Ok(())
    }

    /// Starts the gathers in `listed`. In the recorded order, these are the next ones after `position`. While ranks
    /// agree on operations, all of them start the gathers here, and later find that they have started.
    fn prefetch_listed(
        &mut self,
        root: &Root,
        listed: &[Operation],
        position: Option<usize>,
    ) -> Result<(), Error> {
        let held = root.held();
        for &operation in listed {
            let Some(unit) = operation.unit() else {
                continue;
            };
            // No module may hold a listed unit any more, or backward may have stepped it.
            if held.get(unit) != Some(&true) || self.early.stepped.contains(&unit) {
                continue;
            }
            let order = self.order.current();
            let next = match position {
                Some(position) => match order.next_unshard(position, operation) {
                    Some(next) => Some(next),
                    None => continue,
                },
                None => None,
            };
            if !self.order.has_prefetched(operation, next) {
                self.start_ahead(root, operation, next)?;
            }
        }
        Ok(())
    }

    fn start_ahead(
        &mut self,
        root: &Root,
        operation: Operation,
        position: Option<usize>,
    ) -> Result<(), Error> {
        let generation = self.copy_in_use(root, operation)?;
        let is_joined = !generation.life.is_sharded();
        if is_joined {
            drop(root.start_join(&generation, operation)?)
        } else {
            root.start_gather(&generation, operation)?
        }
        self.order.add_prefetched(Ahead {
            operation,
            position,
            generation,
            is_joined,
        });
        Ok(())
    }
}
