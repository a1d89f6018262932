//! Backward: gather again, collect gradients, reduce them unit by unit.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{FullPart, ProcessGroup, Received, Reduction as Averaging, Source};

use super::{Ended, Gradient, Phase, Progress, Reduced, Reduction, Root};
use crate::checkpoint::{self, Mode};
use crate::error::Error;
use crate::generation::{Generation, State};
use crate::op::{self, Access};
use crate::precision::cast;
use crate::schedule::Operation;
use crate::slot::Slot;
use crate::transport;
use crate::unit::{Unit, averaging};

impl Root {
    /// The full parameter, for a recomputation inside backward.
    pub(crate) fn regather(&self, access: &Access) -> Result<Tensor<1>, Error> {
        let generation = &access.generation;
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            let gathered = unit.slots[access.slot].is_gathered();
            if gathered && !generation.is_unsharded() {
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
            true => unit.slots[access.slot].unsharded_bytes(),
            false => 0,
        };
        let account = self.pool.account(bytes);
        let mut progress = self.progress();
        let of_use = progress
            .gradients
            .entry(access.use_id)
            .or_insert_with(|| unit.places());
        let gradient = Gradient {
            tensor: gradient,
            account,
        };
        gradient.add_to(&mut of_use[access.slot]);
    }

    /// The last gradient of a use has come: free the full parameters, start the reduction.
    /// Returns the gradients of reductions that are through.
    pub(crate) fn unit_end(&self, access: &Access) -> Result<Vec<Reduced>, Error> {
        let generation = &access.generation;
        let unit = &generation.unit;
        self.step(|progress| {
            progress.enter_backward(self)?;
            // Without a reduction there may be no optimizer step before the next forward: what stays
            // from forward to backward may as well stay until then.
            let stays = unit.keeps() && !unit.syncs();
            let reshards = unit.switches.reshard_after_backward.load(Relaxed);
            // What is being gathered already is for another use of the unit.
            if reshards && !stays && generation.is_unsharded() {
                *generation.state.lock() = State::Sharded;
            }
            progress.open.retain(|(id, _)| *id != access.use_id);
            let gradients = progress.gradients.remove(&access.use_id);
            let gradients = gradients.unwrap_or_else(|| unit.places());
            if unit.syncs() {
                progress.advance(self, Operation::Reduce(unit.position()))?;
                progress.reduce(self, generation, gradients)?;
            } else {
                progress.hold(self, generation, gradients);
            }
            // The gradients of a region's own graph are not those of the step.
            Ok(match checkpoint::mode() {
                Mode::Again => Vec::new(),
                Mode::Off | Mode::Plain => std::mem::take(&mut progress.done),
            })
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
        self.reduce_held(root)?;
        self.advance(root, Operation::Finish)?;
        self.complete(root, 0)?;
        self.reduce_whole(root)?;
        for unit in root.units() {
            unit.drop_pieces();
        }
        self.phase = Phase::Idle;
        self.num_finished += 1;
        self.pass = None;
        self.open.clear();
        Ok(std::mem::take(&mut self.done))
    }

    /// Keeps the gradients of one use of a unit on this rank, in the type in which they will be
    /// reduced.
    fn hold(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        gradients: Vec<Option<Gradient>>,
    ) {
        let unit = &generation.unit;
        let held = self
            .held
            .entry(unit.position())
            .or_insert_with(|| unit.places());
        for ((place, gradient), slot) in held.iter_mut().zip(gradients).zip(&unit.slots) {
            let Some(gradient) = gradient else { continue };
            let gradient = match gradient.tensor.dtype() == slot.reduce {
                true => gradient,
                false => Gradient {
                    tensor: cast(gradient.tensor, slot.reduce),
                    account: root
                        .pool
                        .account(slot.partition.num_elements() * slot.reduce_element.size()),
                },
            };
            gradient.add_to(place);
        }
        self.ended(generation);
    }

    /// Reduces what steps without reduction have left of units that this step did not use.
    fn reduce_held(&mut self, root: &Root) -> Result<(), Error> {
        let held: Vec<_> = self.held.keys().copied().collect();
        for index in held {
            let generation = self.copy_in_use(root, index)?;
            if generation.unit.syncs() {
                self.advance(root, Operation::Reduce(index))?;
                let nothing = generation.unit.places();
                self.reduce(root, &generation, nothing)?;
            }
        }
        Ok(())
    }

    /// Reduces the gradients of one use of a unit, with those held back before. Slots without a
    /// gradient on this rank count as zero; a flag for each travels with the reduction.
    pub(super) fn reduce(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        mut gradients: Vec<Option<Gradient>>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        unit.drop_pieces();
        if let Some(held) = self.held.remove(&unit.position()) {
            for ((place, held), slot) in gradients.iter_mut().zip(held).zip(&unit.slots) {
                if let Some(gradient) = place {
                    let tensor = gradient.tensor.clone();
                    gradient.tensor = cast(tensor, slot.reduce);
                }
                if let Some(held) = held {
                    held.add_to(place);
                }
            }
        }
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
        for &index in &slots {
            let slot = &unit.slots[index];
            sources.push(source_of(gradients[index].take(), slot, unit)?);
        }
        let of = |&slot: &usize| &unit.slots[slot];
        let own = unit.group.rank();
        let mean = widened(unit.averaging(), slots.iter().map(of));
        let label = root.label(format_args!("{} reduction", unit.label()));
        let into = slots.iter().map(of).map(|slot| {
            root.reduced
                .take(slot.held_elements(own) * slot.element.size())
        });
        let into = into.collect();
        let is_sharded = slots.iter().map(of).any(Slot::is_gathered);
        let parts = slots.iter().map(of).zip(sources);
        let group = &unit.groups.reduce;
        let pending = if is_sharded {
            let parts = parts.map(|(slot, source)| slot.part(source, slot.reduce_element));
            group.start_reduce_scatter(label, used, mean, parts.collect(), into)?
        } else {
            let parts = parts.map(|(slot, source)| slot.full_part(source, slot.reduce_element));
            group.start_all_reduce(label, used, mean, parts.collect(), into)?
        };
        self.in_flight.push_back(Reduction {
            pending,
            generation: generation.clone(),
            slots,
        });
        // Here, and not where the result is wanted: a rank that only takes part must let go of the
        // others' gradients at the same place in the order.
        self.complete(root, root.in_flight_limit())
    }

    /// The books of a unit whose backward has ended.
    fn ended(&mut self, generation: &Arc<Generation>) -> &mut Ended {
        let known = self
            .ended
            .iter()
            .position(|ended| Arc::ptr_eq(&ended.generation, generation));
        let index = known.unwrap_or_else(|| {
            self.ended.push(Ended {
                generation: generation.clone(),
                whole: generation.unit.places(),
            });
            self.ended.len() - 1
        });
        &mut self.ended[index]
    }

    /// Puts aside the gradients that are reduced at the end of backward.
    fn keep_whole(&mut self, generation: &Arc<Generation>, gradients: &mut [Option<Gradient>]) {
        let whole = &mut self.ended(generation).whole;
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
    fn complete(&mut self, root: &Root, limit: usize) -> Result<(), Error> {
        while self.in_flight.len() > limit {
            let Some(reduction) = self.in_flight.pop_front() else {
                break;
            };
            let Reduction {
                pending,
                generation,
                slots,
            } = reduction;
            // Not before the peers have read them are the full gradients gone.
            let Received { buffers, notes, .. } = pending.wait_released()?;
            let used: Vec<u8> = (0..slots.len())
                .map(|index| u8::from(is_used(&notes, index)))
                .collect();
            let (buffers, notes) = match &generation.unit.groups.replicas {
                None => (buffers, vec![used]),
                Some(replicas) => {
                    let sums = tensors(&generation, &slots, buffers);
                    match self.cross(root, replicas, &generation, &slots, sums, used)? {
                        Some(crossed) => (crossed.buffers, crossed.notes),
                        None => continue,
                    }
                }
            };
            let leaves = slots.iter().map(|&slot| (&generation, slot));
            self.done.extend(gradients_of(leaves, buffers, &notes));
        }
        Ok(())
    }

    /// Adds up the shards' gradients of all replicas; or puts them aside, where that is switched
    /// off.
    fn cross(
        &mut self,
        root: &Root,
        replicas: &ProcessGroup,
        generation: &Generation,
        slots: &[usize],
        sums: Vec<Tensor<1>>,
        mut used: Vec<u8>,
    ) -> Result<Option<Received>, Error> {
        let unit = &generation.unit;
        let mut aside = self
            .partial
            .remove(&unit.position())
            .unwrap_or_else(|| unit.places());
        let mut waiting = unit.places();
        for ((&index, sum), used) in slots.iter().zip(sums).zip(&mut used) {
            waiting[index] = match (aside[index].take(), *used) {
                (None, 0) => None,
                (None, _) => Some(sum),
                (Some(earlier), 0) => Some(earlier),
                (Some(earlier), _) => Some(earlier + sum),
            };
            *used = u8::from(waiting[index].is_some());
        }
        if !unit.switches.all_reduce.load(Relaxed) {
            self.partial.insert(unit.position(), waiting);
            return Ok(None);
        }
        let own = unit.group.rank();
        let mut parts = Vec::with_capacity(slots.len());
        let mut into = Vec::with_capacity(slots.len());
        for &index in slots {
            let slot = &unit.slots[index];
            let bytes = slot.held_elements(own) * slot.element.size();
            parts.push(FullPart {
                source: match waiting[index].take() {
                    Some(sum) => transport::source(sum, None),
                    None => Source::new(vec![0; bytes]),
                },
                num_elements: slot.held_elements(own),
                element: slot.element,
            });
            into.push(root.reduced.take(bytes));
        }
        let label = root.label(format_args!("{} reduction over replicas", unit.label()));
        let pending = replicas.start_all_reduce(label, used, Averaging::sum(), parts, into)?;
        Ok(Some(pending.wait_released()?))
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
            if !generation.unit.syncs() {
                continue;
            }
            for index in generation.unit.whole_slots(&generation) {
                let slot = &generation.unit.slots[index];
                let gradient = unit_end.whole[index].take();
                used.push(u8::from(gradient.is_some()));
                let gradient = gradient.map(|tensor| Gradient {
                    tensor,
                    account: root.pool.account(0),
                });
                let source = source_of(gradient, slot, &generation.unit)?;
                parts.push(slot.full_part(source, slot.reduce_element));
                into.push(root.reduced.take(slot.full_bytes()));
                leaves.push((generation.clone(), index));
            }
        }
        let num_leaves = leaves.len();
        let needs = self.schedules.current().needs();
        let note = [used, needs].concat();
        let (buffers, mut notes) = if parts.is_empty() {
            let label = root.label(format_args!("end of backward"));
            let notes = root.group.exchange(label, note)?;
            (Vec::new(), notes)
        } else {
            let mean = averaging(root.group.size(), root.factors);
            let slots = leaves
                .iter()
                .map(|(generation, slot)| &generation.unit.slots[*slot]);
            let mean = widened(mean, slots);
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
        self.schedules.current().close(&needs);
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
    leaves
        .zip(buffers)
        .enumerate()
        .filter(|(index, _)| is_used(notes, *index))
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

/// Whether any rank flagged place `index`.
fn is_used(notes: &[Vec<u8>], index: usize) -> bool {
    notes.iter().any(|note| note.get(index) == Some(&1))
}

/// Reduced gradients as tensors, in the type of the shards.
fn tensors<B>(generation: &Generation, slots: &[usize], buffers: Vec<B>) -> Vec<Tensor<1>>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let tensor = |(&index, buffer): (&usize, B)| {
        let device = generation.value(index).device().without_autodiff();
        transport::tensor(buffer, generation.unit.slots[index].dtype, &device)
    };
    slots.iter().zip(buffers).map(tensor).collect()
}

/// `reduction` with results in the type of the shards, where gradients travel in another.
fn widened<'a>(reduction: Averaging, mut slots: impl Iterator<Item = &'a Slot>) -> Averaging {
    match slots.find(|slot| slot.reduce_element != slot.element) {
        Some(slot) => reduction.output(slot.element),
        None => reduction,
    }
}

/// A gradient as a source, as the policy's hook wants it; zeros where this rank has none.
fn source_of(gradient: Option<Gradient>, slot: &Slot, unit: &Unit) -> Result<Source, Error> {
    let elements = slot.partition.num_elements();
    let Some(Gradient { tensor, account }) = gradient else {
        return Ok(Source::new(vec![0; elements * slot.reduce_element.size()]));
    };
    let tensor = match &unit.gradients.hook {
        Some(hook) => hook.call(&slot.path, tensor),
        None => tensor,
    };
    let [len] = tensor.dims();
    if len != elements || tensor.is_autodiff() {
        return Err(Error::Hook {
            path: slot.path.clone(),
            expected: elements,
            got: match tensor.is_autodiff() {
                true => format!("{len} elements with a graph"),
                false => format!("{len} elements"),
            },
        });
    }
    Ok(transport::source(cast(tensor, slot.reduce), Some(account)))
}

impl Gradient {
    /// Adds to what is there.
    fn add_to(self, place: &mut Option<Self>) {
        *place = Some(match place.take() {
            Some(earlier) => Self {
                tensor: earlier.tensor + self.tensor,
                account: earlier.account,
            },
            None => self,
        });
    }
}
