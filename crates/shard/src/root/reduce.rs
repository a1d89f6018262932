//! Reductions: from full gradients on every rank to those of its shards.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn_fsdp_collectives::{
    Fingerprint, FullPart, Label, ProcessGroup, Received, Reduction as Averaging, Source,
};

use super::accumulate::{Gradient, Sum};
use super::arrival::{Arrival, gradients_of, is_used, source_of, tensors};
use super::reductions::Reduction;
use super::state::{Progress, Root};
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::op::Reduced;
use crate::schedule::{Note, Operation};
use crate::seal;
use crate::slot::{Slot, Slots};
use crate::spec::averaging;

/// The words for the sum of the shards' gradients that crosses to the replicas.
const SUM: &str = "the reduced gradient";

impl Progress {
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
        self.gradients.add_held(generation, &mut gradients)?;
        self.gradients.keep_whole(generation, &mut gradients);
        let slots = generation.reduced_slots();
        if slots.is_empty() {
            return Ok(());
        }
        tell_replicas(generation, &slots);
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
        self.reductions.in_flight.push_back(Reduction {
            pending,
            generation: generation.clone(),
            slots,
            arrival,
        });
        // Here, and not where the result is wanted: a rank that only takes part must let go of the
        // others' gradients at the same place in the order.
        self.complete(root, root.in_flight_limit())
    }

    /// Waits until at most `limit` reductions are under way.
    pub(super) fn complete(&mut self, root: &Root, limit: usize) -> Result<(), Error> {
        while self.reductions.in_flight.len() > limit {
            let Some(reduction) = self.reductions.in_flight.pop_front() else {
                break;
            };
            let Reduction {
                pending,
                generation,
                slots,
                arrival,
            } = reduction;
            // Not before the peers have read them are the full gradients gone.
            let received = pending.wait_released()?;
            let used: Vec<u8> = (0..slots.len())
                .map(|index| u8::from(is_used(&received.notes, index)))
                .collect();
            let (received, notes, arrival) = match &generation.unit.groups.replicas {
                None => (received, vec![used], arrival),
                Some(replicas) => {
                    let sums = tensors(&generation, &slots, received, arrival);
                    match self.cross(root, replicas, &generation, &slots, sums, used)? {
                        Some(mut crossed) => {
                            let notes = std::mem::take(&mut crossed.notes);
                            (crossed, notes, Arrival::AsHeld)
                        }
                        None => continue,
                    }
                }
            };
            let leaves = slots.iter().map(|&slot| (&generation, slot));
            let arrived = gradients_of(leaves, received, &notes, arrival);
            self.arrive(root, arrived)?;
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
        sums: Vec<Sum>,
        mut used: Vec<u8>,
    ) -> Result<Option<Received>, Error> {
        let unit = &generation.unit;
        let mut aside = self
            .gradients
            .partial
            .remove(&unit.position())
            .unwrap_or_else(|| unit.empty_slots());
        let mut waiting = unit.empty_slots();
        for ((&index, sum), used) in slots.iter().zip(sums).zip(&mut used) {
            waiting[index] = match (aside[index].take(), *used) {
                (None, 0) => None,
                (None, _) => Some(sum),
                (Some(earlier), 0) => Some(earlier),
                (Some(earlier), _) => {
                    for (addend, seal) in [&earlier, &sum] {
                        let named = || generation.named_as(SUM, index);
                        seal::check(&root.group, seal.as_ref(), addend, named)?;
                    }
                    let sum = earlier.0 + sum.0;
                    let seal = seal::seal(&root.group, &sum);
                    Some((sum, seal))
                }
            };
            *used = u8::from(waiting[index].is_some());
        }
        if !unit.switches.all_reduce.load(Relaxed) {
            self.gradients.partial.insert(unit.position(), waiting);
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
                    Some((sum, seal)) => {
                        let named = || Label::from(generation.named_as(SUM, index));
                        unit.staging.source(sum, None).sealed(seal, named)
                    }
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
        let ended = std::mem::take(&mut self.gradients.ended);
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
                    seal: None,
                });
                let is_used = gradient.is_some();
                let unit = &generation.unit;
                sources.push((is_used, source_of(gradient, &unit.slots[index], unit)?));
                leaves.push((generation.clone(), index));
            }
        }
        let order = self.order.current();
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
        tell_whole(root, &leaves);
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
        let mut received = pending.wait_released()?;
        let notes = std::mem::take(&mut received.notes);
        let notes = Note::split_all(notes, places);
        let used: Vec<_> = notes.iter().map(|note| note.used.clone()).collect();
        let leaves = leaves.iter().map(|(generation, slot)| (generation, *slot));
        let arrived = gradients_of(leaves, received, &used, arrival);
        self.arrive(root, arrived)?;
        Ok(notes)
    }

    /// Keeps gradients that have arrived until they go into Burn's `Gradients`, and holds those that are sealed until an
    /// optimizer reads them.
    fn arrive(&mut self, root: &Root, arrived: Vec<Reduced>) -> Result<(), Error> {
        let backward = self.counts.finished;
        for reduced in &arrived {
            self.waiting.add(&root.group, backward, reduced)?;
        }
        self.reductions.done.extend(arrived);
        Ok(())
    }
}

/// Tells the ranks that hold the same values of a unit what this one has written there.
fn tell_replicas(generation: &Generation, slots: &[usize]) {
    let groups = &generation.unit.groups;
    for &slot in slots {
        match generation.unit.slots[slot].is_gathered() {
            false => tell(&groups.reduce, generation, slot),
            true => groups
                .replicas
                .iter()
                .for_each(|group| tell(group, generation, slot)),
        }
    }
}

/// Tells all ranks what this one has written in parameters that all keep whole.
fn tell_whole(root: &Root, leaves: &[(Arc<Generation>, usize)]) {
    for (generation, slot) in leaves {
        tell(&root.group, generation, *slot);
    }
}

/// Tells a group whose ranks all hold the value of `slot` what this one has written there.
fn tell(group: &ProcessGroup, generation: &Generation, slot: usize) {
    let Some(seal) = generation.seal(slot).filter(|_| group.size() > 1) else {
        return;
    };
    let path = &generation.unit.slots[slot].path;
    let number = Fingerprint::of(&(path, generation.version()));
    group.tell_replica(number, &seal, || Label::from(generation.named(slot)));
}
