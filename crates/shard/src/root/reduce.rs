//! Reductions of full gradients to each rank's shards.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{
    Fingerprint, FullPart, ProcessGroup, Reduction as Averaging, RestKind,
};
use burn_fsdp_tensors::Medium;

use super::accumulate::Gradient;
use super::arrival::{Arrival, Arrived, Whole, hooked, source};
use super::audited::{GivenGradient, Station};
use super::reductions::{Flight, Reduction};
use super::state::{Progress, Root};
use crate::copies::{Copies, Generation};
use crate::error::Error;
use crate::op::Reduced;
use crate::schedule::{Note, Operation};
use crate::seal;
use crate::slot::{Slot, Slots};
use crate::spec::averaging;
use crate::unit::Unit;

impl Root {
    /// Returns true if reduced gradients of a unit wait in the shards.
    pub(crate) fn holds_sums_of(&self, unit: &Unit) -> bool {
        let progress = self.progress();
        let (index, gradients) = (unit.position(), &progress.gradients);
        gradients.partial.contains_key(&index) || gradients.whole.contains_key(&index)
    }

    /// Returns the bytes of a unit's full gradients that are held back on this rank.
    pub(crate) fn held_bytes_of(&self, unit: &Unit) -> usize {
        let progress = self.progress();
        let held = progress.gradients.held.get(&unit.position());
        let held = held.into_iter().flat_map(|held| held.iter()).flatten();
        held.map(|gradient| gradient.account.len()).sum()
    }

    /// Returns false if reduced gradients stay in the shards until a later backward.
    pub(super) fn is_last(&self) -> bool {
        self.is_last.load(Relaxed)
    }

    /// Sets whether later backwards return the gradients.
    pub(crate) fn set_last(&self, is_last: bool) {
        self.is_last.store(is_last, Relaxed);
    }
}

impl Progress {
    /// Reduces the gradients of one use of a unit, including held-back ones. Slots without a gradient on this rank
    /// count as zero, and the reduction's note has a flag for each slot.
    pub(super) fn reduce(
        &mut self,
        root: &Root,
        (generation, use_id): (&Arc<Generation>, u64),
        mut gradients: Slots<Gradient>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        self.audited.reduces(generation);
        Copies::of(generation).drop_pieces();
        let (of_use, held) = ((generation, use_id), &mut self.gradients);
        held.add_held(&mut self.audited, of_use, &mut gradients)?;
        held.keep_whole(&mut self.audited, of_use, &mut gradients);
        let slots = generation.reduced_slots();
        if slots.is_empty() {
            return Ok(());
        }
        tell_replicas(root, generation, &slots);
        if let Some(hook) = &unit.hooks.reduction {
            let by_hook = self.reduce_by(root, hook, of_use, &slots, &mut gradients)?;
            return self.take_off(root, generation, slots, Flight::Hook(by_hook));
        }
        let group = &unit.groups.reduce;
        let devices = slots.iter().map(|&index| generation.device(index));
        let medium = Medium::of(group, devices);
        let mut given = Vec::with_capacity(slots.len());
        let mut sources = Vec::with_capacity(slots.len());
        for &index in &slots {
            let slot = &unit.slots[index];
            let gradient = gradients[index].take();
            let from = Station::Use(use_id);
            given.push(GivenGradient::of((unit, index), from, gradient.as_ref()));
            let gradient = gradient.map(|gradient| hooked(gradient, slot, unit));
            sources.push(source(gradient.transpose()?, (unit, slot), &medium));
        }
        let note = self.unit_note(unit, &given);
        let of = |&slot: &usize| &unit.slots[slot];
        let own = unit.groups.shard.rank();
        let (mean, arrival) = Arrival::of(unit.averaging(), slots.iter().map(of));
        let label = root.label(format_args!(
            "{} reduction, values {:08x},{}",
            unit.label(),
            generation.fingerprint(),
            generation.refrozen(false)
        ));
        let into = slots.iter().map(of).map(|slot| {
            let bytes = slot.held_elements(own) * arrival.element(slot).size();
            medium.buffer(&root.reduced, bytes)
        });
        let into = into.collect();
        let is_sharded = slots.iter().map(of).any(Slot::is_gathered);
        let parts = slots.iter().map(of).zip(sources);
        let pending = if is_sharded {
            let parts = parts.map(|(slot, source)| slot.part(source, slot.elements.reduce));
            group.start_reduce_scatter(label, note, mean, parts.collect(), into)?
        } else {
            let parts = parts.map(|(slot, source)| slot.full_part(source, slot.elements.reduce));
            group.start_all_reduce(label, note, mean, parts.collect(), into)?
        };
        self.audited.carries(Some(unit), pending.operation());
        let flight = Flight::Engine {
            pending,
            mean,
            arrival,
        };
        self.take_off(root, generation, slots, flight)
    }

    /// Adds a reduction that has started, and waits for earlier ones.
    fn take_off(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        slots: Vec<usize>,
        flight: Flight,
    ) -> Result<(), Error> {
        self.reductions.in_flight.push_back(Reduction {
            generation: generation.clone(),
            slots,
            flight,
        });
        // This happens here, and not where the result is needed: a rank that only takes part must release the other
        // ranks' gradients at the same place in the order.
        self.complete(root, root.in_flight_limit())
    }

    /// Waits until at most `limit` reductions are in progress.
    pub(super) fn complete(&mut self, root: &Root, limit: usize) -> Result<(), Error> {
        while self.reductions.in_flight.len() > limit {
            let Some(reduction) = self.reductions.in_flight.pop_front() else {
                break;
            };
            let Reduction {
                generation,
                slots,
                flight,
            } = reduction;
            let arrived = match flight {
                Flight::Engine {
                    pending,
                    mean,
                    arrival,
                } => {
                    // The full gradients are kept until the other ranks have read them.
                    let received = pending.wait_released()?;
                    self.early.hear(&generation.unit, &received.notes);
                    let groups = &generation.unit.groups;
                    Arrived::of(received, (&mean, groups.reduce.size()), arrival)
                }
                Flight::Hook(by_hook) => by_hook.wait()?,
            };
            self.cross_over(root, &generation, &slots, arrived)?;
        }
        Ok(())
    }

    /// Delivers the gradients that the shard group has reduced, after an all-reduce across replicas if there are any.
    /// If they must wait for a later backward, sets them aside instead.
    fn cross_over(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        slots: &[usize],
        arrived: Arrived,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        let mut waiting = self.with_aside(root, generation, slots, arrived)?;
        if !root.is_last() || !unit.crosses() {
            self.gradients.partial.insert(unit.position(), waiting);
            return Ok(());
        }
        let gradients = match &unit.groups.replicas {
            None => self.reduced_sums(root, generation, slots, &mut waiting)?,
            Some(replicas) => {
                let crossed = match &unit.hooks.all_reduce {
                    Some(hook) => {
                        self.cross_by(root, (hook, replicas), generation, slots, waiting)?
                    }
                    None => self.cross(root, replicas, generation, slots, waiting)?,
                };
                self.reduced_of(root, generation, slots, crossed)?
            }
        };
        self.deliver(generation, slots, gradients)
    }

    /// Adds the gradients that were set aside earlier to the shards' gradients.
    fn with_aside(
        &mut self,
        root: &Root,
        generation: &Generation,
        slots: &[usize],
        mut arrived: Arrived,
    ) -> Result<Slots<Tensor<1>>, Error> {
        let unit = &generation.unit;
        let mut aside = self
            .gradients
            .partial
            .remove(&unit.position())
            .unwrap_or_else(|| unit.empty_slots());
        let mut waiting = unit.empty_slots();
        for &index in slots {
            let sum = arrived.next(&mut self.audited, generation, index);
            waiting[index] = self.added(root, (generation, index), aside[index].take(), sum)?;
        }
        Ok(waiting)
    }

    /// Sums the shards' gradients over all replicas.
    fn cross(
        &mut self,
        root: &Root,
        replicas: &ProcessGroup,
        generation: &Generation,
        slots: &[usize],
        mut waiting: Slots<Tensor<1>>,
    ) -> Result<Arrived, Error> {
        let unit = &generation.unit;
        let own = unit.groups.shard.rank();
        let homes = slots.iter().map(|&index| generation.home(index));
        let medium = Medium::of(replicas, homes);
        let mut parts = Vec::with_capacity(slots.len());
        let mut into = Vec::with_capacity(slots.len());
        let mut given = Vec::with_capacity(slots.len());
        for &index in slots {
            let slot = &unit.slots[index];
            let (elements, stored) = (slot.held_elements(own), slot.elements.stored);
            let sum = waiting[index].take();
            given.push(GivenGradient::of((unit, index), Station::Sum, sum.as_ref()));
            let sealed = unit.seals.take(seal::place(index, RestKind::Sum));
            parts.push(FullPart {
                source: match sum {
                    Some(sum) => medium.source(&unit.staging, sum, None).noted(sealed),
                    None => medium.zeros(elements, stored.dtype),
                },
                num_elements: elements,
                element: stored.wire,
            });
            into.push(medium.buffer(&root.reduced, elements * stored.size()));
        }
        let label = root.label(format_args!("{} reduction over replicas", unit.label()));
        let sum = Averaging::sum();
        let note = self.unit_note(unit, &given);
        let pending = replicas.start_all_reduce(label, note, sum, parts, into)?;
        self.audited.carries(Some(unit), pending.operation());
        let received = pending.wait_released()?;
        self.early.hear(unit, &received.notes);
        let of = (&sum, replicas.size());
        Ok(Arrived::of(received, of, Arrival::AsHeld))
    }

    /// Completes all reductions, and averages the gradients of whole parameters computed since the last call. Tells the
    /// other ranks that this rank next wants `wanted`, and returns the messages of all ranks.
    pub(super) fn reduce_whole(
        &mut self,
        root: &Root,
        wanted: Operation,
    ) -> Result<Vec<Note>, Error> {
        self.complete(root, 0)?;
        let ended = self.gradients.ended.iter();
        let refrozen = ended.map(|ended| ended.generation.refrozen(true));
        let refrozen = refrozen.max().unwrap_or_default();
        let mut by_factors = self.take_whole(root)?.into_iter();
        let whole = by_factors.next().unwrap_or_default();
        let order = self.order.current();
        let (wish, marks) = (order.wish(wanted), order.marks().to_vec());
        let given: Vec<_> = whole.iter().map(Whole::given).collect();
        let note = self.audited.last_note(wish, marks, &given);
        let lengths = note.lengths();
        let notes = if whole.is_empty() {
            let label = root.label(format_args!("end of backward{refrozen}"));
            root.group.exchange(label, note.join())?
        } else {
            let of_reduction = |notes: &[Vec<u8>]| {
                let notes = Note::split_all(notes.to_vec(), lengths);
                notes.iter().map(Note::of_reduction).collect()
            };
            self.average_whole(root, (note.join(), &refrozen), whole, of_reduction)?
        };
        for whole in by_factors {
            let given: Vec<_> = whole.iter().map(Whole::given).collect();
            let note = self.audited.note(&given);
            self.average_whole(root, (note, &refrozen), whole, <[_]>::to_vec)?;
        }
        let notes = Note::split_all(notes, lengths);
        self.audited.hear(&notes);
        Ok(notes)
    }

    /// Takes the gradients of parameters kept whole whose units reduce in this step, as one list for each set of divide
    /// factors and each hook. There is one list unless units differ in these.
    fn take_whole(&mut self, root: &Root) -> Result<Vec<Vec<Whole>>, Error> {
        let mut taken: Vec<Vec<Whole>> = Vec::new();
        for mut ended in std::mem::take(&mut self.gradients.ended) {
            let unit = &ended.generation.unit;
            if !unit.syncs() {
                continue;
            }
            for slot in ended.generation.whole_slots() {
                let gradient = ended.whole[slot].take().map(|whole| Gradient {
                    tensor: whole,
                    account: root.pool.account(0),
                });
                let own = gradient.map(|gradient| hooked(gradient, &unit.slots[slot], unit));
                let whole = Whole {
                    generation: ended.generation.clone(),
                    slot,
                    own: own.transpose()?,
                };
                let alike = |list: &&mut Vec<Whole>| {
                    let first = list.first();
                    first.is_some_and(|first| {
                        first.factors() == whole.factors() && first.hook() == whole.hook()
                    })
                };
                match taken.iter_mut().find(alike) {
                    Some(list) => list.push(whole),
                    None => taken.push(vec![whole]),
                }
            }
        }
        Ok(taken)
    }

    /// Averages gradients of parameters kept whole over all ranks, with the factors that they share. Returns the ranks'
    /// notes, from which `of_reduction` extracts the reduction's own notes. `refrozen` names a parameter that was frozen
    /// since the module was sharded.
    fn average_whole(
        &mut self,
        root: &Root,
        (note, refrozen): (Vec<u8>, &str),
        whole: Vec<Whole>,
        of_reduction: impl FnOnce(&[Vec<u8>]) -> Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        if let Some(hook) = whole.first().and_then(Whole::hook).cloned() {
            return self.average_whole_by(root, &hook, note, whole, of_reduction);
        }
        let factors = whole.first().and_then(Whole::factors);
        let mut leaves = Vec::with_capacity(whole.len());
        let mut sources = Vec::with_capacity(whole.len());
        let devices = whole
            .iter()
            .map(|whole| whole.generation.device(whole.slot));
        let medium = Medium::of(&root.group, devices);
        for whole in whole {
            let unit = &whole.generation.unit;
            let slot = &unit.slots[whole.slot];
            sources.push(source(whole.own, (unit, slot), &medium));
            leaves.push((whole.generation, whole.slot));
        }
        let slots = leaves
            .iter()
            .map(|(generation, slot)| &generation.unit.slots[*slot]);
        tell_whole(root, &leaves);
        let mean = averaging(root.group.size(), factors);
        let (mean, arrival) = Arrival::of(mean, slots.clone());
        let into = slots.clone().map(|slot| {
            let bytes = slot.partition.num_elements() * arrival.element(slot).size();
            medium.buffer(&root.reduced, bytes)
        });
        let into = into.collect();
        let parts = slots.zip(sources);
        let parts = parts.map(|(slot, source)| slot.full_part(source, slot.elements.reduce));
        let label = root.label(format_args!("parameters kept whole, reduction{refrozen}"));
        let pending = root
            .group
            .start_all_reduce(label, note, mean, parts.collect(), into)?;
        self.audited.carries(None, pending.operation());
        let mut received = pending.wait_released()?;
        let notes = std::mem::take(&mut received.notes);
        received.notes = of_reduction(&notes);
        let arrived = Arrived::of(received, (&mean, root.group.size()), arrival);
        self.take_whole_in(root, &leaves, arrived)?;
        Ok(notes)
    }

    /// Passes on the reduced gradients of parameters kept whole, or sets them aside.
    pub(super) fn take_whole_in(
        &mut self,
        root: &Root,
        leaves: &[(Arc<Generation>, usize)],
        mut arrived: Arrived,
    ) -> Result<(), Error> {
        let mut gradients = Vec::with_capacity(leaves.len());
        for (generation, slot) in leaves {
            let sum = arrived.next(&mut self.audited, generation, *slot);
            gradients.extend(self.whole_or_later(root, generation, *slot, sum)?);
        }
        self.arrive(gradients);
        Ok(())
    }

    /// Returns the gradient of a parameter kept whole, plus the one that waits for the last backward; `None` if this is
    /// not the last backward.
    fn whole_or_later(
        &mut self,
        root: &Root,
        generation: &Generation,
        slot: usize,
        sum: Option<Tensor<1>>,
    ) -> Result<Option<Reduced>, Error> {
        let unit = &generation.unit;
        let earlier = self.gradients.whole.get_mut(&unit.position());
        let earlier = earlier.and_then(|waiting| waiting[slot].take());
        let sum = self.added(root, (generation, slot), earlier, sum)?;
        if root.is_last() {
            let reduced = |sum| self.reduced(root, (generation, slot), Station::Sum, sum);
            return sum.map_or(Ok(None), reduced);
        }
        let waiting = self.gradients.whole.entry(unit.position());
        waiting.or_insert_with(|| unit.empty_slots())[slot] = sum;
        Ok(None)
    }

    /// Releases the waiting gradients of parameters kept whole that the last backward did not use.
    pub(super) fn hand_out_whole(&mut self, root: &Root) -> Result<(), Error> {
        for (index, mut waiting) in std::mem::take(&mut self.gradients.whole) {
            let Some(unit) = root.unit(index) else {
                continue;
            };
            if !unit.syncs() {
                self.gradients.whole.insert(index, waiting);
                continue;
            }
            let generation = self.copy_in_use(root, Operation::Reduce(index))?;
            self.audited.reduces(&generation);
            let slots: Vec<_> = (0..unit.slots.len()).collect();
            let gradients = self.reduced_sums(root, &generation, &slots, &mut waiting)?;
            self.arrive(gradients);
        }
        Ok(())
    }
}

/// Reports the checksums of a unit's values, as this rank wrote them, to the ranks that hold the same values.
fn tell_replicas(root: &Root, generation: &Generation, slots: &[usize]) {
    let groups = &generation.unit.groups;
    for &slot in slots {
        if generation.unit.slots[slot].is_gathered() {
            groups
                .replicas
                .iter()
                .for_each(|group| tell((root, group), generation, slot))
        } else {
            tell((root, &groups.reduce), generation, slot)
        }
    }
}

/// Reports the checksums of parameters kept whole, as this rank wrote them, to all ranks.
pub(super) fn tell_whole(root: &Root, leaves: &[(Arc<Generation>, usize)]) {
    for (generation, slot) in leaves {
        tell((root, &root.group), generation, *slot);
    }
}

/// Reports the checksum of this rank's value of `slot` to `group`, whose ranks all hold that value.
fn tell((root, group): (&Root, &ProcessGroup), generation: &Generation, slot: usize) {
    let Some(sealed) = generation.sealed(slot).filter(|_| group.size() > 1) else {
        return;
    };
    let path = &generation.unit.slots[slot].path;
    let number = Fingerprint::of(&(root.number, path, generation.version()));
    group.tell_replica(number, &sealed.seal, || sealed.what.clone());
}
