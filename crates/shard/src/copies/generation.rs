//! The values that one copy of a module holds for one unit.
//!
//! Burn passes modules by value. `optim.step`, `load_record`, `valid`, `train`, `to_device` and any `map` replace the
//! parameters one at a time, and `clone` creates a second, independent module. A gather needs all values of a unit at
//! once, and they must belong together: a [`Generation`] is a set of such values. Every transition moves a parameter
//! from its generation to the *child* that the same pass over the module is filling, and two passes over one generation
//! create two children. So each parameter always belongs to a set that holds its current value, regardless of its
//! siblings.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{Fingerprint, Keeper, Partition, ProcessGroup, RestKind};
use parking_lot::Mutex;

use super::holders::Holders;
use super::lifecycle::LifeCycle;
use super::values::{Value, Values};
use crate::convert::{self, cast};
use crate::device;
use crate::error::Error;
use crate::files;
use crate::seal;
use crate::shown::Shown;
use crate::slot::{Holding, Slots};
use crate::unit::Unit;

/// A kind of pass over a module that replaces its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Transition {
    /// `Module::map`: an optimizer step, a record, a moving average.
    Map,
    /// `Module::valid`.
    Valid,
    /// `Module::train`.
    Train,
    /// `Module::to_device` or `Module::fork`.
    Device,
}

/// The values of one unit in one copy of the module.
pub(crate) struct Generation {
    pub(crate) unit: Arc<Unit>,
    pub(super) kin: Arc<Kin>,
    epoch: AtomicU64,
    /// The fingerprint of the values' history. `valid`, `train` and moves to a device preserve it.
    version: AtomicU64,
    pub(crate) life: LifeCycle,
    /// This rank's pieces of the full parameters by slot, which forward keeps for a gather among neighbours in
    /// backward.
    pieces: Mutex<Option<Slots<Tensor<1>>>>,
    /// The seals of values, full parameters and pieces.
    pub(crate) seals: Keeper,
    /// The device of full parameters, without autodiff, for an offloaded unit.
    compute: Mutex<Option<Device>>,
    pub(super) values: Mutex<Values>,
    children: Mutex<Children>,
    /// References from copies of the module to the parameters in this generation.
    pub(crate) holders: Holders,
    /// A cached view of a copy whose parameters are in several generations, of which this is the first.
    view: Mutex<Option<View>>,
}

/// The generations that passes over a module have created from one.
#[derive(Default)]
struct Children {
    known: Vec<(Transition, Weak<Generation>)>,
    /// Number of children that each transition has ever created.
    counts: [usize; 4],
}

/// A joint generation with values from several generations.
struct View {
    /// The generation that holds each slot's value.
    sources: Vec<Weak<Generation>>,
    joint: Arc<Generation>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("unit", &self.unit.label())
            .field("epoch", &self.epoch())
            .field("state", &self.life.state())
            .finish_non_exhaustive()
    }
}

impl Generation {
    /// Creates the first generation of a unit, without values.
    pub(crate) fn first(unit: Arc<Unit>) -> Arc<Self> {
        Self::new(unit, Arc::default(), 0, 0, None)
    }

    fn new(
        unit: Arc<Unit>,
        kin: Arc<Kin>,
        epoch: u64,
        version: u64,
        parent: Option<&Self>,
    ) -> Arc<Self> {
        let slots = 0..unit.slots.len();
        let compute = match parent {
            Some(parent) => parent.compute.lock().clone(),
            None => unit.offload.as_ref().map(|offload| offload.compute.clone()),
        };
        let inherited = slots
            .clone()
            .map(|slot| parent.map(|parent| parent.held(slot)))
            .collect();
        let values = Values {
            own: slots.map(|_| None).collect(),
            inherited,
        };
        let generation = Arc::new(Self {
            seals: unit.groups.shard.keeper(),
            values: Mutex::new(values),
            holders: Holders::new(unit.slots.len()),
            view: Mutex::default(),
            unit,
            kin,
            epoch: AtomicU64::new(epoch),
            version: AtomicU64::new(version),
            life: LifeCycle::default(),
            pieces: Mutex::default(),
            compute: Mutex::new(compute),
            children: Mutex::default(),
        });
        if let Some(parent) = parent {
            (0..generation.unit.slots.len()).for_each(|slot| generation.keep_seal(slot, parent));
        }
        generation.kin.adopt(&generation);
        generation
    }

    /// Returns a generation with the value of each slot from the source at the same index.
    pub(crate) fn joined(sources: &[Arc<Self>]) -> Arc<Self> {
        let first = &sources[0];
        if sources.iter().all(|source| Arc::ptr_eq(source, first)) {
            return first.clone();
        }
        let mut view = first.view.lock();
        if let Some(view) = &*view {
            let known = view.sources.iter().map(Weak::as_ptr);
            if known.eq(sources.iter().map(Arc::as_ptr)) {
                return view.joint.clone();
            }
        }
        let mut hasher = Fingerprint::new();
        for source in sources {
            source.version().hash(&mut hasher);
        }
        let version = hasher.finish();
        let joint = Self::new(
            first.unit.clone(),
            first.kin.clone(),
            version,
            version,
            None,
        );
        *joint.compute.lock() = first.compute.lock().clone();
        let values = sources.iter().enumerate();
        joint.values.lock().own = values
            .map(|(slot, source)| Some(source.held(slot)))
            .collect();
        let seals = sources.iter().enumerate();
        seals.for_each(|(slot, source)| joint.keep_seal(slot, source));
        *view = Some(View {
            sources: sources.iter().map(Arc::downgrade).collect(),
            joint: joint.clone(),
        });
        joint
    }

    /// Returns the identifier of the pass that created this generation, equal on all ranks and for all units of one
    /// copy.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Returns the fingerprint of the values' history. Copies with equal versions hold equal values.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// Returns a short form of the version, for labels. Gathers must fail between ranks that hold values of different
    /// steps or copies.
    pub(crate) fn fingerprint(&self) -> u32 {
        let version = self.version();
        (version ^ (version >> 32)) as u32
    }

    /// Restarts the history of the values when the unit gets a new root.
    pub(crate) fn restart(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Relaxed);
        self.version.store(epoch, Ordering::Relaxed);
        self.describe_seals();
    }

    pub(crate) fn set(&self, slot: usize, value: &Shown) {
        let mut values = self.values.lock();
        let mut value = Value::of(value);
        if !(value.stays(values.known(slot)) && self.sealed(slot).is_some()) {
            let seal = seal::seal(self.holders_group(), &value.plain);
            self.keep(RestKind::Value, slot, seal);
        }
        if self.unit.slots[slot].folder.is_some() {
            value = value.summed(values.known(slot));
        }
        values.own[slot] = Some(value);
        values.inherited[slot] = None;
    }

    /// Returns the group of ranks, including this one, that together hold the values.
    pub(crate) fn holders_group(&self) -> &ProcessGroup {
        &self.unit.groups.shard
    }

    /// Returns the 32-bit form of the value of `slot`, if one is kept.
    pub(crate) fn exact(&self, slot: usize) -> Option<Tensor<1>> {
        self.held(slot).exact
    }

    /// Keeps `exact` as the 32-bit form of the value of `slot`, until the value changes.
    pub(crate) fn keep_exact(&self, slot: usize, exact: Tensor<1>) -> Result<(), Error> {
        let exact = self.unit.in_file(slot, files::AVERAGE, exact)?;
        if let Some(value) = self.values.lock().own[slot].as_mut() {
            value.exact = Some(exact);
        }
        Ok(())
    }

    pub(super) fn held(&self, slot: usize) -> Value {
        self.values.lock().held(slot)
    }

    /// Returns the untracked value of `slot`, on an autodiff device if the module uses one.
    pub(crate) fn value(&self, slot: usize) -> Tensor<1> {
        let Value { plain, device, .. } = self.held(slot);
        device::tracked(self.unit.elements_of(slot, plain), &device)
    }

    pub(crate) fn plain(&self, slot: usize) -> Tensor<1> {
        self.unit.elements_of(slot, self.raw(slot))
    }

    /// Returns the untracked value of `slot` in the form in which it is held, possibly a base in fewer bits.
    pub(crate) fn raw(&self, slot: usize) -> Tensor<1> {
        self.held(slot).plain
    }

    /// Returns the graph node to which gradients of `slot` belong, if it is trainable.
    pub(crate) fn node(&self, slot: usize) -> Option<NodeId> {
        self.held(slot).node
    }

    /// Returns the device of the full parameter of `slot`, with autodiff if the module uses it.
    pub(crate) fn device(&self, slot: usize) -> Device {
        let home = self.held(slot).device;
        match &*self.compute.lock() {
            Some(compute) => device::alike(compute, &home),
            None => home,
        }
    }

    /// Returns the device of the value of `slot`, without autodiff.
    pub(crate) fn home(&self, slot: usize) -> Device {
        self.held(slot).device.without_autodiff()
    }

    /// Sets the device of full parameters from now on, if the unit is offloaded.
    pub(crate) fn compute_on(&self, device: &Device) {
        if let Some(compute) = self.compute.lock().as_mut() {
            *compute = device.clone().without_autodiff();
        }
    }

    /// Returns the graph parent of the full parameter of `slot`: `parent`, the flat leaf that optimizers see, or a new
    /// leaf if `parent` is on another device (for an offloaded unit) or has a different shape.
    pub(crate) fn leaf(&self, slot: usize, parent: Tensor<1>) -> Tensor<1> {
        let is_flat = self.unit.slots[slot].shown_dims() == 1;
        if is_flat && self.unit.offload.is_none() {
            parent
        } else {
            self.own_leaf(slot)
        }
    }

    /// Returns a new leaf, trained if the value of `slot` is.
    pub(crate) fn own_leaf(&self, slot: usize) -> Tensor<1> {
        let leaf = Tensor::zeros([1], &self.device(slot));
        leaf.set_require_grad(self.is_trainable(slot))
    }

    /// Returns a new leaf for the adapted weight of `slot`, trained if any of its parts is; `None` without an adapter.
    pub(crate) fn adapted_leaf(&self, slot: usize) -> Option<Tensor<1>> {
        let adapter = self.unit.slots[slot].adapter?;
        let mut parts = adapter.slots().chain([slot]);
        let is_trained = parts.any(|part| self.is_trainable(part));
        let leaf = Tensor::zeros([1], &self.device(slot));
        Some(leaf.set_require_grad(is_trained))
    }

    /// Returns this rank's part of the parameter of `slot`, in the compute type and on the computing device.
    pub(crate) fn held_there(&self, slot: usize) -> Tensor<1> {
        let held = self.computing(slot);
        if self.unit.offload.is_none() {
            return held;
        }
        let device = self.device(slot).without_autodiff();
        self.unit.staging.moved(held, &device)
    }

    pub(crate) fn is_trainable(&self, slot: usize) -> bool {
        self.node(slot).is_some()
    }

    /// Moves `slot` to the child that `transition` is filling, with the new value `value`, and returns that child.
    pub(crate) fn descend(
        self: &Arc<Self>,
        slot: usize,
        transition: Transition,
        value: &Shown,
    ) -> Arc<Self> {
        let mut children = self.children.lock();
        let Children { known, counts } = &mut *children;
        known.retain(|(_, child)| child.strong_count() > 0);
        let open = known.iter().rev().find_map(|(made_by, child)| {
            let child = child.upgrade()?;
            // A generation that only a backward graph still holds is not being filled.
            let free = child.values.lock().own[slot].is_none() && child.holders.is_held();
            (*made_by == transition && free).then_some(child)
        });
        let child = open.unwrap_or_else(|| {
            counts[transition as usize] += 1;
            let epoch = mix(self.epoch(), transition, counts[transition as usize]);
            let version = match transition {
                Transition::Map => epoch,
                _ => self.version(),
            };
            let child = Self::new(
                self.unit.clone(),
                self.kin.clone(),
                epoch,
                version,
                Some(self),
            );
            known.push((transition, Arc::downgrade(&child)));
            child
        });
        drop(children);
        child.set(slot, value);
        child
    }

    /// Drops the full parameters, but keeps this rank's pieces if backward gathers them among neighbours.
    pub(crate) fn reshard_after_forward(&self) -> Result<(), Error> {
        let Some(full) = self.life.take_full() else {
            return Ok(());
        };
        self.check_full(&full)?;
        let Some(neighbours) = &self.unit.groups.neighbours else {
            return Ok(());
        };
        let slots = self.unit.slots.iter().zip(full);
        let pieces = slots.map(|(slot, full)| {
            let full = full?;
            let elements = slot.partition.num_elements();
            let cut = Partition::flat(elements, neighbours.size()).ok()?;
            // The data is copied, because a slice would keep the whole parameter alive.
            Some(convert::copied(full.slice([cut.range(neighbours.rank())])))
        });
        let pieces: Slots<_> = pieces.collect();
        for (slot, piece) in pieces.iter().enumerate() {
            let seal = piece.as_ref().map(|piece| seal::seal(neighbours, piece));
            self.keep(RestKind::Piece, slot, seal.flatten());
        }
        *self.pieces.lock() = Some(pieces);
        Ok(())
    }

    /// Drops the full parameters after checking that they still equal the gathered values, or cancels their gather.
    pub(crate) fn let_go(&self) -> Result<(), Error> {
        let full = self.life.take_full();
        full.map_or(Ok(()), |full| self.check_full(&full))
    }

    /// Returns the pieces that forward left for this rank's group of neighbours, if any.
    pub(crate) fn pieces(&self) -> Option<Slots<Tensor<1>>> {
        self.pieces.lock().clone()
    }

    pub(crate) fn drop_pieces(&self) {
        *self.pieces.lock() = None;
    }

    /// Returns this rank's part of the parameter in slot `index`, in the compute type.
    pub(crate) fn computing(&self, index: usize) -> Tensor<1> {
        cast(
            self.plain(index),
            self.unit.slots[index].elements.compute.dtype,
        )
    }

    /// Returns the trainable slots whose gradients the unit's own reduction carries, in order.
    pub(crate) fn reduced_slots(&self) -> Vec<usize> {
        self.trainable(|holding| *holding != Holding::Whole)
    }

    /// Returns the trainable slots whose gradients are reduced at the end of backward, in order.
    pub(crate) fn whole_slots(&self) -> Vec<usize> {
        self.trainable(|holding| *holding == Holding::Whole)
    }

    /// Names the first parameter that was frozen or unfrozen after the module was sharded, of those that are kept whole or
    /// of the others; empty if none was. With it in a reduction's label, ranks that differ in it see its name.
    pub(crate) fn refrozen(&self, kept_whole: bool) -> String {
        let mut slots = self.unit.slots.iter().enumerate();
        let changed = slots.find(|(index, slot)| {
            (slot.holding == Holding::Whole) == kept_whole
                && slot.starts_trained != self.is_trainable(*index)
        });
        match changed {
            None => String::new(),
            Some((_, slot)) if slot.starts_trained => format!(" with `{}` frozen,", slot.path),
            Some((_, slot)) => format!(" with `{}` unfrozen,", slot.path),
        }
    }

    fn trainable(&self, is_wanted: impl Fn(&Holding) -> bool) -> Vec<usize> {
        let wanted = |index: &usize| is_wanted(&self.unit.slots[*index].holding);
        let all = (0..self.unit.slots.len()).filter(wanted);
        all.filter(|&index| self.is_trainable(index)).collect()
    }
}

/// The generations of one unit.
#[derive(Default)]
pub(super) struct Kin(Mutex<Vec<Weak<Generation>>>);

impl Kin {
    fn adopt(&self, generation: &Arc<Generation>) {
        let mut known = self.0.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(generation));
    }

    /// Returns the generations that still exist, in the order in which they were created.
    pub(super) fn live(&self) -> Vec<Arc<Generation>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

/// Returns an identifier for a pass, equal for all units and ranks after the same passes.
fn mix(epoch: u64, transition: Transition, ordinal: usize) -> u64 {
    Fingerprint::of(&(epoch, transition, ordinal))
}
