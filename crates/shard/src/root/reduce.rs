//! Reductions: from full gradients on every rank to those of its shards.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{
    Account, FullPart, Pending, ProcessGroup, Received, Reduction as Averaging, Source,
};

use super::{Progress, Root};
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::op::Reduced;
use crate::schedule::{Note, Operation};
use crate::slot::{Element, Slot, Slots};
use crate::spec::averaging;
use crate::transport::{self, cast};
use crate::unit::Unit;

/// A full gradient, counted while it lives.
pub(super) struct Gradient {
    pub(super) tensor: Tensor<1>,
    pub(super) account: Account,
}

/// A unit whose backward has ended.
pub(super) struct Ended {
    generation: Arc<Generation>,
    /// Gradients of parameters kept whole, by slot.
    whole: Slots<Tensor<1>>,
}

/// A reduction under way.
pub(super) struct Reduction {
    pending: Pending<Received>,
    generation: Arc<Generation>,
    slots: Vec<usize>,
    arrival: Arrival,
}

impl Progress {
    /// Keeps the gradients of one use of a unit on this rank, in the type in which they will be
    /// reduced.
    pub(super) fn hold(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        gradients: Slots<Gradient>,
    ) {
        let unit = &generation.unit;
        let held = self
            .held
            .entry(unit.position())
            .or_insert_with(|| unit.empty_slots());
        for ((place, gradient), slot) in held.iter_mut().zip(gradients).zip(&unit.slots) {
            let Some(gradient) = gradient else { continue };
            let gradient = match gradient.tensor.dtype() == slot.elements.reduce.dtype {
                true => gradient,
                false => Gradient {
                    tensor: cast(gradient.tensor, slot.elements.reduce.dtype),
                    account: root
                        .pool
                        .account(slot.partition.num_elements() * slot.elements.reduce.size()),
                },
            };
            gradient.add_to(place);
        }
    }

    /// Reduces what steps without reduction have left of units that this step did not use.
    pub(super) fn reduce_held(&mut self, root: &Root) -> Result<(), Error> {
        let held: Vec<_> = self.held.keys().copied().collect();
        for index in held {
            let syncs = root.unit(index).is_some_and(|unit| unit.syncs());
            // What comes before it in the order may have taken them along.
            if syncs && self.held.contains_key(&index) {
                let operation = Operation::Reduce(index);
                self.advance(root, operation)?;
                let generation = self.copy_in_use(root, operation)?;
                let nothing = generation.unit.empty_slots();
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
        mut gradients: Slots<Gradient>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        Copies::of(generation).drop_pieces();
        if let Some(held) = self.held.remove(&unit.position()) {
            for ((place, held), slot) in gradients.iter_mut().zip(held).zip(&unit.slots) {
                let Some(held) = held else { continue };
                if let Some(gradient) = place {
                    let tensor = gradient.tensor.clone();
                    gradient.tensor = cast(tensor, slot.elements.reduce.dtype);
                }
                held.add_to(place);
            }
        }
        self.keep_whole(generation, &mut gradients);
        let slots = generation.reduced_slots();
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
        let own = unit.groups.shard.rank();
        let (mean, arrival) = Arrival::of(unit.averaging(), slots.iter().map(of));
        let label = root.label(format_args!(
            "{} reduction, values {:08x},",
            unit.label(),
            generation.fingerprint()
        ));
        let into = slots.iter().map(of).map(|slot| {
            root.reduced
                .take(slot.held_elements(own) * arrival.element(slot).size())
        });
        let into = into.collect();
        let is_sharded = slots.iter().map(of).any(Slot::is_gathered);
        let parts = slots.iter().map(of).zip(sources);
        let group = &unit.groups.reduce;
        let pending = if is_sharded {
            let parts = parts.map(|(slot, source)| slot.part(source, slot.elements.reduce));
            group.start_reduce_scatter(label, used, mean, parts.collect(), into)?
        } else {
            let parts = parts.map(|(slot, source)| slot.full_part(source, slot.elements.reduce));
            group.start_all_reduce(label, used, mean, parts.collect(), into)?
        };
        self.in_flight.push_back(Reduction {
            pending,
            generation: generation.clone(),
            slots,
            arrival,
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
                whole: generation.unit.empty_slots(),
            });
            self.ended.len() - 1
        });
        &mut self.ended[index]
    }

    /// Puts aside the gradients that are reduced at the end of backward.
    fn keep_whole(&mut self, generation: &Arc<Generation>, gradients: &mut [Option<Gradient>]) {
        let whole = &mut self.ended(generation).whole;
        for slot in generation.whole_slots() {
            if let Some(gradient) = gradients[slot].take() {
                let to = generation.unit.slots[slot].elements.reduce.dtype;
                // Gradients that were held back are in the type in which they are reduced.
                whole[slot] = Some(match whole[slot].take() {
                    Some(earlier) => cast(earlier, to) + cast(gradient.tensor, to),
                    None => gradient.tensor,
                });
            }
        }
    }

    /// Waits until at most `limit` reductions are under way.
    pub(super) fn complete(&mut self, root: &Root, limit: usize) -> Result<(), Error> {
        while self.in_flight.len() > limit {
            let Some(reduction) = self.in_flight.pop_front() else {
                break;
            };
            let Reduction {
                pending,
                generation,
                slots,
                arrival,
            } = reduction;
            // Not before the peers have read them are the full gradients gone.
            let Received { buffers, notes, .. } = pending.wait_released()?;
            let used: Vec<u8> = (0..slots.len())
                .map(|index| u8::from(is_used(&notes, index)))
                .collect();
            let (buffers, notes, arrival) = match &generation.unit.groups.replicas {
                None => (buffers, vec![used], arrival),
                Some(replicas) => {
                    let sums = tensors(&generation, &slots, buffers, arrival);
                    match self.cross(root, replicas, &generation, &slots, sums, used)? {
                        Some(crossed) => (crossed.buffers, crossed.notes, Arrival::AsHeld),
                        None => continue,
                    }
                }
            };
            let leaves = slots.iter().map(|&slot| (&generation, slot));
            self.done
                .extend(gradients_of(leaves, buffers, &notes, arrival));
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
            .unwrap_or_else(|| unit.empty_slots());
        let mut waiting = unit.empty_slots();
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
        let own = unit.groups.shard.rank();
        let mut parts = Vec::with_capacity(slots.len());
        let mut into = Vec::with_capacity(slots.len());
        for &index in slots {
            let slot = &unit.slots[index];
            let bytes = slot.held_elements(own) * slot.elements.stored.size();
            parts.push(FullPart {
                source: match waiting[index].take() {
                    Some(sum) => transport::source(sum, None),
                    None => Source::new(vec![0; bytes]),
                },
                num_elements: slot.held_elements(own),
                element: slot.elements.stored.wire,
            });
            into.push(root.reduced.take(bytes));
        }
        let label = root.label(format_args!("{} reduction over replicas", unit.label()));
        let pending = replicas.start_all_reduce(label, used, Averaging::sum(), parts, into)?;
        Ok(Some(pending.wait_released()?))
    }

    /// Completes all reductions and averages the gradients of the parameters that every rank holds
    /// whole: those that have come since this was last done. Tells the other ranks that `wanted` is
    /// next, and returns what they tell.
    pub(super) fn reduce_whole(
        &mut self,
        root: &Root,
        wanted: Operation,
    ) -> Result<Vec<Note>, Error> {
        self.complete(root, 0)?;
        let ended = std::mem::take(&mut self.ended);
        let mut leaves = Vec::new();
        let mut sources = Vec::new();
        for mut unit_end in ended {
            let generation = unit_end.generation;
            if !generation.unit.syncs() {
                continue;
            }
            for index in generation.whole_slots() {
                let gradient = unit_end.whole[index].take().map(|tensor| Gradient {
                    tensor,
                    account: root.pool.account(0),
                });
                let is_used = gradient.is_some();
                let unit = &generation.unit;
                sources.push((is_used, source_of(gradient, &unit.slots[index], unit)?));
                leaves.push((generation.clone(), index));
            }
        }
        let order = self.schedules.current();
        let marks = order.marks().to_vec();
        let places = marks.len();
        let note = Note {
            wish: order.wish(wanted),
            marks,
            used: sources.iter().map(|&(used, _)| u8::from(used)).collect(),
        };
        let slots = leaves
            .iter()
            .map(|(generation, slot)| &generation.unit.slots[*slot]);
        if sources.is_empty() {
            let label = root.label(format_args!("end of backward"));
            let notes = root.group.exchange(label, note.join())?;
            return Ok(Note::split_all(notes, places));
        }
        let mean = averaging(root.group.size(), root.factors);
        let (mean, arrival) = Arrival::of(mean, slots.clone());
        let into = slots.clone().map(|slot| {
            let bytes = slot.partition.num_elements() * arrival.element(slot).size();
            root.reduced.take(bytes)
        });
        let into = into.collect();
        let parts = slots.zip(sources);
        let parts = parts.map(|(slot, (_, source))| slot.full_part(source, slot.elements.reduce));
        let label = root.label(format_args!("parameters kept whole, reduction"));
        let pending =
            root.group
                .start_all_reduce(label, note.join(), mean, parts.collect(), into)?;
        let received = pending.wait_released()?;
        let notes = Note::split_all(received.notes, places);
        let used: Vec<_> = notes.iter().map(|note| note.used.clone()).collect();
        let leaves = leaves.iter().map(|(generation, slot)| (generation, *slot));
        let gradients = gradients_of(leaves, received.buffers, &used, arrival);
        self.done.extend(gradients);
        Ok(notes)
    }
}

/// In which element type reduced gradients arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// In that in which each parameter is held.
    AsHeld,
    /// In that in which each gradient travels: one reduction gives its results one type, and the
    /// parameters are held in several.
    AsReduced,
}

impl Arrival {
    /// Of what `reduction` makes of the gradients of `slots`, told what to make of them.
    fn of<'a>(
        reduction: Averaging,
        slots: impl Iterator<Item = &'a Slot> + Clone,
    ) -> (Averaging, Self) {
        let Some(widened) = slots
            .clone()
            .find(|slot| slot.elements.reduce != slot.elements.stored)
        else {
            return (reduction, Self::AsHeld);
        };
        let mut elements = slots.map(|slot| slot.elements.stored);
        match elements.all(|element| element == widened.elements.stored) {
            true => (reduction.output(widened.elements.stored.wire), Self::AsHeld),
            false => (reduction, Self::AsReduced),
        }
    }

    fn element(self, slot: &Slot) -> Element {
        match self {
            Self::AsHeld => slot.elements.stored,
            Self::AsReduced => slot.elements.reduce,
        }
    }

    /// What has arrived in `buffer`, as it is held, in memory of its own: an optimizer may write
    /// over a gradient, and what it makes of it outlives the step.
    fn tensor(self, slot: &Slot, buffer: impl AsRef<[u8]>, device: &Device) -> Tensor<1> {
        let dtype = self.element(slot).dtype;
        let arrived = transport::owned(buffer.as_ref().to_vec(), dtype, device);
        cast(arrived, slot.elements.stored.dtype)
    }
}

/// The reduced gradients of `leaves` that any rank used.
fn gradients_of<'a, B: AsRef<[u8]>>(
    leaves: impl Iterator<Item = (&'a Arc<Generation>, usize)>,
    buffers: Vec<B>,
    notes: &[Vec<u8>],
    arrival: Arrival,
) -> Vec<Reduced> {
    leaves
        .zip(buffers)
        .enumerate()
        .filter(|(index, _)| is_used(notes, *index))
        .filter_map(|(_, ((generation, index), buffer))| {
            let slot = &generation.unit.slots[index];
            let device = generation.home(index);
            Some(Reduced {
                node: generation.node(index)?,
                gradient: arrival.tensor(slot, buffer, &device),
            })
        })
        .collect()
}

/// Whether any rank flagged place `index`.
fn is_used(notes: &[Vec<u8>], index: usize) -> bool {
    notes.iter().any(|note| note.get(index) == Some(&1))
}

/// Reduced gradients as tensors, in the type of the shards.
fn tensors<B: AsRef<[u8]>>(
    generation: &Generation,
    slots: &[usize],
    buffers: Vec<B>,
    arrival: Arrival,
) -> Vec<Tensor<1>> {
    let tensor = |(&index, buffer): (&usize, B)| {
        let device = generation.home(index);
        arrival.tensor(&generation.unit.slots[index], buffer, &device)
    };
    slots.iter().zip(buffers).map(tensor).collect()
}

/// A gradient as a source, as the policy's hook wants it; zeros where this rank has none.
fn source_of(gradient: Option<Gradient>, slot: &Slot, unit: &Unit) -> Result<Source, Error> {
    let elements = slot.partition.num_elements();
    let Some(Gradient { tensor, account }) = gradient else {
        return Ok(Source::new(vec![0; elements * slot.elements.reduce.size()]));
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
    Ok(transport::source(
        cast(tensor, slot.elements.reduce.dtype),
        Some(account),
    ))
}

impl Gradient {
    /// Adds to what is there.
    pub(super) fn add_to(self, place: &mut Option<Self>) {
        *place = Some(match place.take() {
            Some(earlier) => Self {
                tensor: earlier.tensor + self.tensor,
                account: earlier.account,
            },
            None => self,
        });
    }
}
