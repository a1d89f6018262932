//! Backward: gather again, collect gradients, reduce them unit by unit.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{Reduction as Averaging, Source};

use super::{Ended, Gradient, Phase, Progress, Reduced, Reduction, Root};
use crate::error::Error;
use crate::generation::{Generation, State};
use crate::op::{self, Access};
use crate::schedule::Operation;
use crate::slot::Slot;
use crate::transport;

impl Root {
    /// The full parameter, for a recomputation inside backward.
    pub(crate) fn regather(&self, access: &Access) -> Result<Tensor<1>, Error> {
        let generation = &access.generation;
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            let gathered = unit.slots[access.slot].is_gathered();
            let is_unsharded = matches!(*generation.state.lock(), State::Unsharded(_));
            if gathered && !is_unsharded {
                progress.note_late_units();
                progress.open.push((access.use_id, unit.clone()));
                let operation = Operation::UnshardBackward(unit.position());
                progress.unshard(self, operation, generation)?;
            }
            self.full(generation, access.slot)
        })
    }

    /// Takes a full gradient over.
    pub(crate) fn receive(&self, access: &Access, gradient: Tensor<1>) {
        let unit = &access.generation.unit;
        let bytes = match unit.slots[access.slot].is_gathered() {
            true => unit.slots[access.slot].full_bytes(),
            false => 0,
        };
        let account = self.pool.account(bytes);
        let mut progress = self.progress.lock();
        let of_use = progress
            .gradients
            .entry(access.use_id)
            .or_insert_with(|| unit.slots.iter().map(|_| None).collect());
        let place = &mut of_use[access.slot];
        *place = Some(match place.take() {
            Some(earlier) => Gradient {
                tensor: earlier.tensor + gradient,
                account: earlier.account,
            },
            None => Gradient {
                tensor: gradient,
                account,
            },
        });
    }

    /// The last gradient of a use has come: free the full parameters, start the reduction.
    /// Returns the gradients of reductions that are through.
    pub(crate) fn unit_end(&self, access: &Access) -> Result<Vec<Reduced>, Error> {
        let generation = &access.generation;
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            {
                // What is being gathered already is for another use of the unit.
                let mut state = generation.state.lock();
                if matches!(*state, State::Unsharded(_)) {
                    *state = State::Sharded;
                }
            }
            progress.open.retain(|(id, _)| *id != access.use_id);
            let gradients = progress.gradients.remove(&access.use_id);
            let gradients = gradients.unwrap_or_else(|| unit.slots.iter().map(|_| None).collect());
            progress.advance(self, Operation::Reduce(unit.position()))?;
            progress.reduce(self, generation, gradients)?;
            Ok(std::mem::take(&mut progress.done))
        })
    }

    /// Reductions that may be under way while backward goes on: as many as units are prefetched,
    /// one at most. More would keep full gradients alive for nothing.
    fn in_flight_limit(&self) -> usize {
        self.prefetch.min(1)
    }

    /// The end of backward: nothing of this step is left pending.
    pub(crate) fn finish(&self) -> Result<Vec<Reduced>, Error> {
        self.step(|progress| {
            if progress.ended.is_empty() {
                // Two forwards in one loss end twice; the first end has done it all.
                return Ok(Vec::new());
            }
            progress.finish(self)
        })
    }

    /// Ends a step whose loss used no unit on this rank, so that no node of ours has run: takes
    /// part in whatever the other ranks do, with the values of the copy `epoch`.
    pub(crate) fn finish_unused(&self, epoch: u64) -> Result<Vec<Reduced>, Error> {
        self.step(|progress| {
            progress.epoch = epoch;
            progress.finish(self)
        })
    }
}

impl Progress {
    fn finish(&mut self, root: &Root) -> Result<Vec<Reduced>, Error> {
        self.enter_backward(root)?;
        self.advance(root, Operation::Finish)?;
        self.complete(0)?;
        self.reduce_whole(root)?;
        self.phase = Phase::Idle;
        self.num_finished += 1;
        self.pass = None;
        self.open.clear();
        Ok(std::mem::take(&mut self.done))
    }

    /// Reduces the gradients of one use of a unit. Slots without a gradient on this rank count as
    /// zero; a flag for each travels with the reduction.
    pub(super) fn reduce(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        mut gradients: Vec<Option<Gradient>>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        self.keep_whole(generation, &mut gradients);
        let slots = unit.reduced_slots(generation);
        if slots.is_empty() {
            return Ok(());
        }
        let used = slots
            .iter()
            .map(|&slot| u8::from(gradients[slot].is_some()));
        let used: Vec<u8> = used.collect();
        let mut sources = Vec::with_capacity(slots.len());
        for &slot in &slots {
            sources.push(source_of(gradients[slot].take(), &unit.slots[slot]));
        }
        let of = |&slot: &usize| &unit.slots[slot];
        let own = unit.group.rank();
        let mean = Averaging::mean(unit.group.size());
        let label = root.label(format_args!("{} reduction", unit.label()));
        let is_sharded = slots.iter().map(of).any(Slot::is_gathered);
        let pending = if is_sharded {
            let into = slots.iter().map(of).map(|slot| {
                let elements = slot.partition.len(own);
                root.reduced.take(elements * slot.element.size())
            });
            let into = into.collect();
            let parts = slots.iter().map(of).zip(sources);
            let parts = parts.map(|(slot, source)| slot.part(source));
            unit.group
                .start_reduce_scatter(label, used, mean, parts.collect(), into)?
        } else {
            let into = slots
                .iter()
                .map(of)
                .map(|slot| root.reduced.take(slot.full_bytes()));
            let into = into.collect();
            let parts = slots.iter().map(of).zip(sources);
            let parts = parts.map(|(slot, source)| slot.full_part(source));
            unit.group
                .start_all_reduce(label, used, mean, parts.collect(), into)?
        };
        self.in_flight.push_back(Reduction {
            pending,
            generation: generation.clone(),
            slots,
        });
        // Here, and not where the result is wanted: a rank that only takes part must let go of the
        // others' gradients at the same place in the order.
        self.complete(root.in_flight_limit())
    }

    /// Puts aside the gradients that are reduced at the end of backward.
    fn keep_whole(&mut self, generation: &Arc<Generation>, gradients: &mut [Option<Gradient>]) {
        let known = self
            .ended
            .iter()
            .position(|ended| Arc::ptr_eq(&ended.generation, generation));
        let index = known.unwrap_or_else(|| {
            self.ended.push(Ended {
                generation: generation.clone(),
                whole: gradients.iter().map(|_| None).collect(),
            });
            self.ended.len() - 1
        });
        let whole = &mut self.ended[index].whole;
        for slot in generation.unit.whole_slots(generation) {
            if let Some(gradient) = gradients[slot].take() {
                whole[slot] = Some(match whole[slot].take() {
                    Some(earlier) => earlier + gradient.tensor,
                    None => gradient.tensor,
                });
            }
        }
    }

    /// Waits until at most `limit` reductions are under way.
    fn complete(&mut self, limit: usize) -> Result<(), Error> {
        while self.in_flight.len() > limit {
            let Some(reduction) = self.in_flight.pop_front() else {
                break;
            };
            // Not before the peers have read them are the full gradients gone.
            let received = reduction.pending.wait_released()?;
            let leaves = reduction
                .slots
                .iter()
                .map(|&slot| (&reduction.generation, slot));
            self.done
                .extend(gradients_of(leaves, received.buffers, &received.notes));
        }
        Ok(())
    }

    /// Averages the gradients of all parameters that every rank holds whole, and closes the order.
    fn reduce_whole(&mut self, root: &Root) -> Result<(), Error> {
        let ended = std::mem::take(&mut self.ended);
        let mut leaves = Vec::new();
        let mut used = Vec::new();
        let mut parts = Vec::new();
        let mut into = Vec::new();
        for mut unit_end in ended {
            let generation = unit_end.generation;
            for index in generation.unit.whole_slots(&generation) {
                let slot = &generation.unit.slots[index];
                let gradient = unit_end.whole[index].take();
                used.push(u8::from(gradient.is_some()));
                let gradient = gradient.map(|tensor| Gradient {
                    tensor,
                    account: root.pool.account(0),
                });
                parts.push(slot.full_part(source_of(gradient, slot)));
                into.push(root.reduced.take(slot.full_bytes()));
                leaves.push((generation.clone(), index));
            }
        }
        let num_leaves = leaves.len();
        let needs = self.schedule.needs();
        let note = [used, needs].concat();
        let (buffers, mut notes) = if parts.is_empty() {
            let label = root.label(format_args!("end of backward"));
            let notes = root.group.exchange(label, note)?;
            (Vec::new(), notes)
        } else {
            let mean = Averaging::mean(root.group.size());
            let label = root.label(format_args!("parameters kept whole, reduction"));
            let pending = root
                .group
                .start_all_reduce(label, note, mean, parts, into)?;
            let received = pending.wait_released()?;
            (received.buffers, received.notes)
        };
        let needs: Vec<_> = notes
            .iter_mut()
            .map(|note| note.split_off(num_leaves.min(note.len())))
            .collect();
        self.schedule.close(&needs);
        let leaves = leaves.iter().map(|(generation, slot)| (generation, *slot));
        self.done.extend(gradients_of(leaves, buffers, &notes));
        Ok(())
    }

    /// A unit that is still open when another is gathered got its gradients too late: its token
    /// was not deep enough.
    fn note_late_units(&mut self) {
        for (_, unit) in self.open.drain(..) {
            unit.deepen();
        }
    }
}

/// The reduced gradients of `leaves` that any rank used.
fn gradients_of<'a, B>(
    leaves: impl Iterator<Item = (&'a Arc<Generation>, usize)>,
    buffers: Vec<B>,
    notes: &[Vec<u8>],
) -> Vec<Reduced>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let is_used = |index: usize| notes.iter().any(|note| note.get(index) == Some(&1));
    leaves
        .zip(buffers)
        .enumerate()
        .filter(|(index, _)| is_used(*index))
        .map(|(_, ((generation, slot), buffer))| {
            let value = generation.value(slot);
            let device = value.device().without_autodiff();
            let dtype = generation.unit.slots[slot].dtype;
            Reduced {
                node: op::node_of(value),
                gradient: transport::tensor(buffer, dtype, &device),
            }
        })
        .collect()
}

/// A gradient as a source; zeros where this rank has none.
fn source_of(gradient: Option<Gradient>, slot: &Slot) -> Source {
    match gradient {
        Some(Gradient { tensor, account }) => transport::source(tensor, Some(account)),
        None => Source::new(vec![0; slot.full_bytes()]),
    }
}
