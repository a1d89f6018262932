//! A unit: the parameters that are gathered, freed and reduced together.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::{Keeper, ProcessGroup, Reduction};
use burn_fsdp_tensors::{self as tensors, Mapped, Staging};
use parking_lot::Mutex;

use crate::adapter::Adapter;
use crate::convert::cast;
use crate::device;
use crate::divide_factors::DivideFactors;
use crate::error::Error;
use crate::files::{self, ShardFileError};
use crate::read::Named;
use crate::schedule::Operation;
use crate::shown::plain;
use crate::spec::{UnitSpec, averaging};

/// The first stride: the number of graph levels between two successive uses of units. It exceeds the depth of a
/// transformer block.
const FIRST_STRIDE: usize = 64;
/// The longest stride to try.
const LONGEST_STRIDE: usize = 1 << 12;
/// Marks a unit for which longer strides did not help. It uses the first stride.
const HOPELESS: usize = 0;

/// Whether full weights are kept from forward to backward, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// They are freed after forward and gathered again.
    No,
    /// They are kept because the unit is a root's, until its module is below another root.
    AsRoot,
    /// They are kept because of the strategy or a user's switch.
    Always,
}

/// The properties that may be switched between steps, in the same way on all ranks.
pub(crate) struct Switches {
    /// True if gradients are reduced after backward; otherwise they stay on this rank.
    pub(crate) sync: AtomicBool,
    /// True if reduced gradients are also reduced across replicas; otherwise they wait in the shards.
    pub(crate) all_reduce: AtomicBool,
    /// True if full parameters are freed when backward no longer needs them.
    pub(crate) reshard_after_backward: AtomicBool,
    /// The divisors of gradients; `None` for the number of ranks.
    pub(crate) factors: Mutex<Option<DivideFactors>>,
    /// The units to gather ahead of their use, in forward and in backward, when this unit has been gathered. `None`
    /// selects the next units in the order.
    pub(crate) prefetch: Mutex<Prefetch>,
}

/// The units to gather when a unit has been gathered, by direction.
#[derive(Default)]
pub(crate) struct Prefetch {
    pub(crate) forward: Option<Vec<Weak<Unit>>>,
    pub(crate) backward: Option<Vec<Weak<Unit>>>,
}

/// A unit of a sharded module on one rank: its fixed properties and its mutable state.
pub(crate) struct Unit {
    spec: UnitSpec,
    name: Mutex<String>,
    keep: Mutex<Keep>,
    pub(crate) switches: Switches,
    /// Position of the unit in its root's list.
    index: AtomicUsize,
    stride: AtomicUsize,
    pub(crate) staging: Arc<Staging>,
    /// The seals of gradients that wait on this rank.
    pub(crate) seals: Keeper,
    /// Whether a module's optimizer has been tried, at the index of the module's first slot.
    tried: Vec<AtomicBool>,
}

impl Named for Unit {
    fn named(&self, slot: usize) -> (String, DType) {
        let slot = &self.slots[slot];
        (slot.path.clone(), slot.elements.compute.dtype)
    }
}

/// Gives access to the fixed properties of the unit.
impl Deref for Unit {
    type Target = UnitSpec;

    fn deref(&self) -> &UnitSpec {
        &self.spec
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unit")
            .field("name", &self.label())
            .field("num_slots", &self.slots.len())
            .finish_non_exhaustive()
    }
}

impl Unit {
    /// Returns a unit that belongs to no root yet.
    pub(crate) fn new(
        name: String,
        keep: Keep,
        factors: Option<DivideFactors>,
        spec: UnitSpec,
    ) -> Self {
        Self {
            name: Mutex::new(name),
            keep: Mutex::new(keep),
            switches: Switches {
                sync: AtomicBool::new(true),
                all_reduce: AtomicBool::new(true),
                reshard_after_backward: AtomicBool::new(true),
                factors: Mutex::new(factors),
                prefetch: Mutex::default(),
            },
            index: AtomicUsize::new(0),
            stride: AtomicUsize::new(FIRST_STRIDE),
            staging: Arc::default(),
            seals: spec.groups.shard.keeper(),
            tried: spec.slots.iter().map(|_| AtomicBool::new(false)).collect(),
            spec,
        }
    }

    /// Returns the unit's name, or `root`, for messages and labels.
    pub(crate) fn label(&self) -> String {
        let name = self.name.lock();
        if name.is_empty() {
            "root".to_owned()
        } else {
            name.clone()
        }
    }

    /// Returns true if reduced gradients may be delivered: there are no replicas, or gradients are reduced across them.
    pub(crate) fn crosses(&self) -> bool {
        self.groups.replicas.is_none() || self.switches.all_reduce.load(Ordering::Relaxed)
    }

    pub(crate) fn keeps(&self) -> bool {
        *self.keep.lock() != Keep::No
    }

    pub(crate) fn set_keeps(&self, keeps: bool) {
        *self.keep.lock() = if keeps { Keep::Always } else { Keep::No };
    }

    pub(crate) fn syncs(&self) -> bool {
        self.switches.sync.load(Ordering::Relaxed)
    }

    /// Returns the gathers that the program listed for the time after `gather`, which is a gather of this unit. Returns
    /// `None` without a list.
    pub(crate) fn listed_after(&self, gather: Operation) -> Option<Vec<Operation>> {
        let prefetch = self.switches.prefetch.lock();
        let (units, operation): (_, fn(usize) -> Operation) = match gather {
            Operation::UnshardForward(_) => (&prefetch.forward, Operation::UnshardForward),
            Operation::UnshardBackward(_) => (&prefetch.backward, Operation::UnshardBackward),
            Operation::Reduce(_) | Operation::Finish => return None,
        };
        let units = units.as_ref()?.iter().filter_map(Weak::upgrade);
        // A unit that keeps its full parameters is not gathered in backward.
        let units =
            units.filter(|unit| matches!(gather, Operation::UnshardForward(_)) || !unit.keeps());
        Some(units.map(|unit| operation(unit.position())).collect())
    }

    pub(crate) fn factors(&self) -> Option<DivideFactors> {
        *self.switches.factors.lock()
    }

    /// Returns the reduction that combines the ranks' gradients: their mean, or their sum scaled by the unit's factors.
    pub(crate) fn averaging(&self) -> Reduction {
        let replicas = self.groups.replicas.as_ref().map_or(1, ProcessGroup::size);
        averaging(self.groups.shard.size() * replicas, self.factors())
    }

    /// Moves the unit, whose module is now at `prefix` in a larger one, below that module's root.
    pub(crate) fn demote(&self, prefix: &str) {
        let mut name = self.name.lock();
        *name = if name.is_empty() {
            prefix.to_owned()
        } else {
            format!("{prefix}.{name}")
        };
        let mut keep = self.keep.lock();
        if *keep == Keep::AsRoot {
            *keep = Keep::No;
        }
    }

    pub(crate) fn set_position(&self, position: usize) {
        self.index.store(position, Ordering::Relaxed);
    }

    pub(crate) fn position(&self) -> usize {
        self.index.load(Ordering::Relaxed)
    }

    /// Returns the number of graph levels between the previous use and this unit's, a multiple of the first stride.
    pub(crate) fn stride(&self) -> usize {
        match self.stride.load(Ordering::Relaxed) {
            HOPELESS => FIRST_STRIDE,
            stride => stride,
        }
    }

    /// Lengthens the stride for the next step, because the unit's gradients arrived after the next gather. If even the
    /// longest stride does not help, depth is not the cause, and the unit returns to the first stride.
    pub(crate) fn deepen(&self) {
        let next = match self.stride.load(Ordering::Relaxed) {
            HOPELESS | LONGEST_STRIDE.. => HOPELESS,
            stride => stride * 2,
        };
        self.stride.store(next, Ordering::Relaxed);
    }

    /// Returns the scale of an adapter, if `slot` is one of its parameters.
    pub(crate) fn adapter_scale(&self, slot: usize) -> Option<f64> {
        let mut adapters = self.slots.iter().filter_map(|slot| slot.adapter.as_ref());
        let adapter = adapters.find(|adapter| adapter.slots().any(|part| part == slot));
        adapter.map(|adapter| adapter.scale)
    }

    /// Returns true if the weight of `slot`, including its adapter's part, needs elements from other ranks.
    pub(crate) fn is_gathered_for(&self, slot: usize) -> bool {
        let adapter = self.slots[slot].adapter.as_ref();
        let factors = adapter.into_iter().flat_map(Adapter::slots);
        let mut parts = factors.chain([slot]);
        parts.any(|part| self.slots[part].is_gathered())
    }

    /// Returns true if the optimizer of the module whose first slot is `slot` has been tried.
    pub(crate) fn is_tried(&self, slot: usize) -> bool {
        self.tried[slot].load(Ordering::Relaxed)
    }

    pub(crate) fn set_tried(&self, slot: usize) {
        self.tried[slot].store(true, Ordering::Relaxed);
    }

    /// Returns this rank's elements of the parameter in `slot`, given the form in which they are held.
    pub(crate) fn elements_of(&self, slot: usize, held: Tensor<1>) -> Tensor<1> {
        let slot = &self.slots[slot];
        let Some(quantized) = slot.quantized() else {
            return held;
        };
        let (device, dtype) = (held.device(), slot.elements.stored.dtype);
        if held.shape().num_elements() == 0 {
            return Tensor::zeros([0], (&device, dtype));
        }
        let record = tensors::source(plain(held), None);
        let part = slot.part_of(self.groups.shard.rank());
        tensors::owned(quantized.elements(record.as_bytes(), part), dtype, &device)
    }

    /// Returns this rank's elements of the parameter in `slot` in the form in which they are held, and an error if they
    /// are not finite and thus have no such form.
    pub(crate) fn packed(&self, slot: usize, elements: Tensor<1>) -> (Tensor<1>, Option<Error>) {
        let slot = &self.slots[slot];
        let Some(quantized) = slot.quantized() else {
            return (elements, None);
        };
        let device = elements.device();
        let words = tensors::source(cast(plain(elements), DType::F32), None);
        let rank = self.groups.shard.rank();
        let (record, not_finite) = quantized.record(words.as_bytes(), slot.part_of(rank));
        let error = not_finite.map(|index| Error::Option {
            option: "base_in",
            expected: "set for finite weights; repair them, or keep them in their own type, without `base_in`",
            got: format!(
                "set for `{}`, whose element {} is infinite or NaN",
                slot.path,
                slot.held_range(rank).start + index
            ),
        });
        (tensors::owned(record, DType::F32, &device), error)
    }

    /// Returns this rank's new elements of the parameter in `slot` in the form in which they are held.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for a base in fewer bits with infinite or NaN elements.
    pub(crate) fn held_form(&self, slot: usize, elements: Tensor<1>) -> Result<Tensor<1>, Error> {
        match self.packed(slot, elements) {
            (held, None) => Ok(held),
            (_, Some(error)) => Err(error),
        }
    }

    /// Returns a flat tensor of the parameter in `slot` with its elements in a file, if the policy keeps them there.
    /// `what` describes them in errors.
    pub(crate) fn in_file(
        &self,
        slot: usize,
        what: &'static str,
        flat: Tensor<1>,
    ) -> Result<Tensor<1>, Box<ShardFileError>> {
        let (device, dtype) = (flat.device(), flat.dtype());
        if self.slots[slot].folder.is_none() || !tensors::is_host(&device) {
            return Ok(flat);
        }
        let source = tensors::source(plain(flat.clone()), None);
        Ok(match self.mapped(slot, what, source.as_bytes())? {
            Some(mapped) => {
                let plain = tensors::tensor(mapped, dtype, &device.clone().without_autodiff());
                device::tracked(plain, &device)
            }
            None => flat,
        })
    }

    /// Writes elements of the parameter in `slot` to a file, if the policy keeps them there.
    pub(crate) fn mapped(
        &self,
        slot: usize,
        what: &'static str,
        bytes: &[u8],
    ) -> Result<Option<Mapped>, Box<ShardFileError>> {
        let folder = self.slots[slot].folder.as_deref();
        let Some(folder) = folder.filter(|_| !bytes.is_empty()) else {
            return Ok(None);
        };
        let mapped = Mapped::new(bytes, folder);
        mapped.map(Some).map_err(|error| {
            let advice = files::advice(error.kind());
            self.file_error(slot, (what, bytes.len()), error.to_string(), advice)
        })
    }

    /// Returns an error about a file with a value of the parameter in `slot`, given its kind and size.
    pub(crate) fn file_error(
        &self,
        slot: usize,
        (what, num_bytes): (&'static str, usize),
        reason: String,
        advice: &'static str,
    ) -> Box<ShardFileError> {
        let slot = &self.slots[slot];
        let folder = slot.folder.as_ref();
        Box::new(ShardFileError {
            rank: self.groups.shard.world_rank(),
            what,
            path: slot.path.clone(),
            unit: self.label(),
            num_bytes,
            folder: folder.map_or_else(String::new, |folder| folder.display().to_string()),
            reason,
            advice,
        })
    }
}
