//! Starts gathers, takes part in gathers that only other ranks need, and waits for them.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::{
    At, ElementType, Fingerprint, Label, Part, Partition, Pending, ProcessGroup, Received,
    RestKind, Source,
};
use burn_fsdp_tensors::{self as tensors, Medium, is_host};

use super::state::Root;
use crate::convert::cast;
use crate::copies::{Gather, Generation, UnitState};
use crate::error::Error;
use crate::hooks::{GatherHook, ParameterShard, PendingTensors, UnitGather};
use crate::packing::Packed;
use crate::pins::{Mark, Marked};
use crate::schedule::Operation;
use crate::seal;
use crate::slot::Slots;

impl Root {
    /// Starts a gather that the program requested, outside of the order.
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

    /// Waits for a gather that the program requested.
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
        if let Some(hook) = &unit.hooks.gather {
            let full = self.gather_by(hook, generation, operation)?;
            generation.life.begin_gather(Gather::ByHook(full));
            return Ok(());
        }
        if unit.groups.shard.size() == 1 {
            // The shard is the whole parameter, so nothing is copied, but all ranks issue the same operation in the
            // same order.
            self.join_gather(generation, operation)?;
            generation.life.begin_gather(Gather::Own);
            return Ok(());
        }
        let Sources {
            group,
            parts,
            medium,
            are_pieces,
        } = sources(generation, operation)?;
        let into = unit.gathered_slots().map(|index| {
            let slot = &unit.slots[index];
            match (are_pieces, &slot.packed) {
                (false, Some(packed)) => self.pool.take(packed.len()),
                _ => medium.buffer(&self.pool, slot.unsharded_bytes()),
            }
        });
        let label = self.gather_label(generation, operation);
        let pending = group.start_all_gather(label, Vec::new(), parts, into.collect())?;
        generation.life.begin_gather(if are_pieces {
            Gather::Pieces(pending)
        } else {
            Gather::Shards(pending)
        });
        Ok(())
    }

    /// Sends this rank's shards to the other ranks, without receiving theirs.
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

    /// Starts to send this rank's shards like [`join_gather`](Self::join_gather), without waiting.
    pub(super) fn start_join(
        &self,
        generation: &Generation,
        operation: Operation,
    ) -> Result<Option<Pending<Received>>, Error> {
        if !generation.unit.is_gathered() {
            return Ok(None);
        }
        if let Some(hook) = &generation.unit.hooks.gather {
            drop(self.gather_by(hook, generation, operation)?);
            return Ok(None);
        }
        let Sources { group, parts, .. } = sources(generation, operation)?;
        let label = self.gather_label(generation, operation);
        Ok(Some(group.join_all_gather(label, Vec::new(), parts)?))
    }

    /// Waits until the full parameters exist. Returns marks of the filled buffers, which track their lifetimes.
    pub(super) fn finish_gather(&self, generation: &Generation) -> Result<Vec<Mark>, Error> {
        let unit = &generation.unit;
        let marks = generation.life.fill(|gather| {
            let mut marks = Vec::new();
            let mut full = unit.empty_slots();
            if let Some(slot) = unit.gathered_slots().next() {
                unit.staging.make_room(&generation.device(slot));
            }
            let (pending, are_packed) = match gather {
                Gather::Shards(pending) => (pending, true),
                Gather::Pieces(pending) => (pending, false),
                Gather::ByHook(pending) => {
                    for (slot, gathered) in unit.gathered_slots().zip(pending.wait()?) {
                        let (mut tensor, mark) = self.gathered_by_hook(generation, slot, gathered);
                        marks.extend(mark);
                        let seal = seal::seal(&unit.groups.shard, &tensor);
                        generation.keep(RestKind::Full, slot, seal);
                        seal::flip_if_told(&self.group, At::Weight, &mut tensor);
                        full[slot] = Some(tensor);
                    }
                    return Ok((full, marks));
                }
                Gather::Own => {
                    for slot in unit.gathered_slots() {
                        full[slot] = Some(match &unit.slots[slot].packed {
                            None => generation.held_there(slot),
                            // The shard is rounded, as it would be with several ranks.
                            Some(packed) => {
                                let record = record(generation, packed, slot)?;
                                let (tensor, mark) =
                                    self.unpacked(generation, slot, packed, record.as_bytes());
                                marks.push(mark);
                                tensor
                            }
                        });
                    }
                    return Ok((full, marks));
                }
            };
            let received = pending.wait()?;
            let mut seals = received.seals.into_iter();
            for (slot, buffer) in unit.gathered_slots().zip(received.buffers) {
                let seal = seals.next();
                let packed = unit.slots[slot].packed.as_ref().filter(|_| are_packed);
                let device = generation.device(slot).without_autodiff();
                let (mut tensor, mark) = match packed {
                    Some(packed) => {
                        let (tensor, mark) =
                            self.unpacked(generation, slot, packed, buffer.as_ref());
                        (tensor, Some(mark))
                    }
                    None => {
                        let dtype = unit.slots[slot].elements.compute.dtype;
                        match tensors::arrived(buffer, dtype) {
                            Ok(tensor) => (tensor, None),
                            Err(buffer) => {
                                let (marked, mark) = Marked::new(buffer);
                                (unit.staging.tensor(marked, dtype, &device), Some(mark))
                            }
                        }
                    }
                };
                marks.extend(mark);
                let seal = match packed {
                    Some(_) => seal::seal(&unit.groups.shard, &tensor),
                    None => seal.filter(|_| is_host(&device)),
                };
                generation.keep(RestKind::Full, slot, seal);
                seal::flip_if_told(&self.group, At::Weight, &mut tensor);
                full[slot] = Some(tensor);
            }
            Ok((full, marks))
        })?;
        // The unit was already gathered, or needs no gather.
        Ok(marks.unwrap_or_default())
    }

    /// Lets the policy's hook gather a unit. Returns the full parameters, one for each gathered slot. If ranks compare
    /// bytes, waits for them.
    fn gather_by(
        &self,
        hook: &GatherHook,
        generation: &Generation,
        operation: Operation,
    ) -> Result<PendingTensors, Error> {
        let unit = &generation.unit;
        let (group, shards) = shards_for_hook(generation, operation)?;
        let pending = hook.call(UnitGather {
            unit: unit.label(),
            label: Label::from(format!("{} hook", self.gather_label(generation, operation))),
            group: group.clone(),
            pool: self.reduced.clone(),
            shards,
        })?;
        if group.size() == 1 || !group.compares_bytes() {
            return Ok(pending);
        }
        // All ranks have issued the same number of operations here, those that only take part, too.
        let full = pending.wait()?;
        let operations = group.counts().total().operations;
        for (index, full) in unit.gathered_slots().zip(&full) {
            if let Some(seal) = seal::seal(group, full) {
                let path = &unit.slots[index].path;
                let number = Fingerprint::of(&(self.number, path, operations));
                let named = || Label::from(generation.named_as("the hook's gather", index));
                group.tell_replica(number, &seal, named);
            }
        }
        Ok(full.into())
    }

    /// Returns a full parameter that the hook has gathered, in the compute type and on the computing device, and the
    /// mark of its buffer in host memory.
    fn gathered_by_hook(
        &self,
        generation: &Generation,
        index: usize,
        full: Tensor<1>,
    ) -> (Tensor<1>, Option<Mark>) {
        let unit = &generation.unit;
        let full = cast(full, unit.slots[index].elements.compute.dtype);
        let device = generation.device(index).without_autodiff();
        self.counted(if full.device() == device {
            full
        } else {
            unit.staging.moved(full, &device)
        })
    }

    /// Returns a full parameter that was created outside of the pool, in the same memory, which the pool now counts. On
    /// the host, also returns the mark of that memory.
    fn counted(&self, full: Tensor<1>) -> (Tensor<1>, Option<Mark>) {
        let (dtype, device) = (full.dtype(), full.device());
        if !is_host(&device) {
            return (full, None);
        }
        let [len] = full.dims();
        let account = self.pool.account(len * dtype.size());
        let (marked, mark) = Marked::new(Lent(tensors::source(full, Some(account))));
        (tensors::tensor(marked, dtype, &device), Some(mark))
    }

    /// Returns the full parameter of a slot, unpacked from the shards in fewer bits, and the mark of its buffer.
    fn unpacked(
        &self,
        generation: &Generation,
        slot: usize,
        packed: &Packed,
        records: &[u8],
    ) -> (Tensor<1>, Mark) {
        let (unit, device) = (&generation.unit, generation.device(slot).without_autodiff());
        let slot = &unit.slots[slot];
        let dtype = slot.elements.compute.dtype;
        let mut buffer = self.pool.take(slot.unsharded_bytes());
        packed.unpack(records, dtype, buffer.as_mut());
        let (marked, mark) = Marked::new(buffer);
        (unit.staging.tensor(marked, dtype, &device), mark)
    }

    /// Returns the full value of a slot, flat and without autodiff. The unit must be unsharded.
    pub(super) fn full(&self, generation: &Generation, slot: usize) -> Result<Tensor<1>, Error> {
        let unit = &generation.unit;
        if !unit.slots[slot].is_gathered() {
            generation.expect_held(slot)?;
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
            advice: "it was resharded while in use: run the forward again, and call `reshard` only on units that no \
                forward is using",
        })
    }

    /// Returns the value that the model uses for a slot, flat and without autodiff: the full value, plus the
    /// contribution of an adapter. The unit must be unsharded.
    pub(super) fn weight(&self, generation: &Generation, slot: usize) -> Result<Tensor<1>, Error> {
        let full = self.full(generation, slot)?;
        let Some(adapter) = &generation.unit.slots[slot].adapter else {
            return Ok(full);
        };
        adapter.applied(full, |slot| self.full(generation, slot))
    }

    fn gather_label(&self, generation: &Generation, operation: Operation) -> Label {
        let direction = match operation {
            Operation::UnshardBackward(_) => "backward",
            _ => "forward",
        };
        let refrozen = generation.refrozen(false) + &generation.refrozen(true);
        self.label(format_args!(
            "{} unshard, {direction}, values {:08x},{refrozen}",
            generation.unit.label(),
            generation.fingerprint()
        ))
    }
}

/// The memory of a tensor.
struct Lent(Source);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The data that a rank publishes for a gather.
struct Sources<'a> {
    group: &'a ProcessGroup,
    parts: Vec<Part>,
    /// The memory of the parts that are not packed.
    medium: Medium,
    /// True if the parts are pieces of full parameters, false if they are shards.
    are_pieces: bool,
}

/// Returns this rank's pieces if forward left them for a backward gather among neighbours, and the neighbours.
fn pieces(
    generation: &Generation,
    operation: Operation,
) -> Option<(&ProcessGroup, Slots<Tensor<1>>)> {
    match operation {
        Operation::UnshardBackward(_) => {
            let neighbours = generation.unit.groups.neighbours.as_ref()?;
            Some((neighbours, generation.pieces()?))
        }
        _ => None,
    }
}

/// Returns the data that this rank publishes for a gather: its pieces if forward left them for a backward gather among
/// neighbours, otherwise its shards.
fn sources(generation: &Generation, operation: Operation) -> Result<Sources<'_>, Error> {
    let unit = &generation.unit;
    let Some((neighbours, pieces)) = pieces(generation, operation) else {
        let (parts, medium) = shards(generation)?;
        return Ok(Sources {
            group: &unit.groups.shard,
            parts,
            medium,
            are_pieces: false,
        });
    };
    let devices = pieces.iter().flatten().map(Tensor::device);
    let medium = Medium::of(neighbours, devices);
    let parts = unit.gathered_slots().map(|index| {
        let slot = &unit.slots[index];
        let piece = pieces[index].clone().expect("gathered slots have pieces");
        let sealed = generation.seals.get(seal::place(index, RestKind::Piece));
        let source = medium.source(&unit.staging, piece, None);
        Ok(Part {
            source: source.noted(sealed),
            partition: Partition::flat(slot.partition.num_elements(), neighbours.size())?,
            element: slot.elements.compute.wire,
        })
    });
    let parts: Result<_, Error> = parts.collect();
    Ok(Sources {
        group: neighbours,
        parts: parts?,
        medium,
        are_pieces: true,
    })
}

/// Returns the data of [`sources`] for a hook, and the group that gathers it.
fn shards_for_hook(
    generation: &Generation,
    operation: Operation,
) -> Result<(&ProcessGroup, Vec<ParameterShard>), Error> {
    let unit = &generation.unit;
    let pieces = pieces(generation, operation);
    let group = pieces
        .as_ref()
        .map_or(&unit.groups.shard, |(group, _)| group);
    let shards = unit.gathered_slots().map(|index| {
        let slot = &unit.slots[index];
        let (tensor, partition) = match &pieces {
            Some((neighbours, pieces)) => {
                let piece = pieces[index].clone().expect("gathered slots have pieces");
                let place = seal::place(index, RestKind::Piece);
                seal::check(&generation.seals, place, &piece)?;
                let elements = slot.partition.num_elements();
                (piece, Partition::flat(elements, neighbours.size())?)
            }
            None => {
                generation.expect_held(index)?;
                generation.flip_if_told(index);
                generation.check(index)?;
                (generation.computing(index), slot.partition)
            }
        };
        Ok(ParameterShard {
            path: slot.path.clone(),
            shape: slot.shape.clone(),
            tensor,
            held: partition.range(group.rank()),
            partition,
        })
    });
    let shards: Result<_, Error> = shards.collect();
    Ok((group, shards?))
}

/// Returns this rank's shards, in the form in which they are sent, and their memory. Shards in fewer bits, and all others
/// of their unit, are sent from the host.
fn shards(generation: &Generation) -> Result<(Vec<Part>, Medium), Error> {
    let unit = &generation.unit;
    let is_packed = |index: usize| unit.slots[index].packed.is_some();
    let medium = if unit.gathered_slots().any(is_packed) {
        Medium::Host
    } else {
        let homes = unit.gathered_slots().map(|index| generation.home(index));
        Medium::of(&unit.groups.shard, homes)
    };
    let parts = unit.gathered_slots().map(|index| {
        generation.expect_held(index)?;
        generation.flip_if_told(index);
        let slot = &unit.slots[index];
        if let Some(packed) = &slot.packed {
            return Ok(Part {
                source: record(generation, packed, index)?,
                partition: packed.bytes(),
                element: ElementType::U8,
            });
        }
        let is_given = slot.elements.stored.dtype == slot.elements.compute.dtype;
        let sealed = if is_given {
            // The transport checks a seal, but not the checksum of a file.
            generation.check_file(index)?;
            generation.sealed(index)
        } else {
            generation.check(index)?;
            None
        };
        let source = medium.source(&unit.staging, generation.computing(index), None);
        Ok(slot.part(source.noted(sealed), slot.elements.compute))
    });
    let parts: Result<_, Error> = parts.collect();
    Ok((parts?, medium))
}

/// Returns this rank's shard of the parameter in slot `index`, in fewer bits.
fn record(generation: &Generation, packed: &Packed, index: usize) -> Result<Source, Error> {
    generation.check(index)?;
    let held = generation.raw(index);
    let staging = &generation.unit.staging;
    match packed {
        Packed::Held(_) => Ok(staging.source(held, None)),
        Packed::Sent(packing) => {
            let held = staging.source(cast(held, DType::F32), None);
            let rank = generation.holders_group().rank();
            Ok(Source::new(packing.packed(held.as_bytes(), rank)))
        }
    }
}
