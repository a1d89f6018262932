//! A unit: the parameters that are gathered, freed and reduced together.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};
use burn_fsdp_collectives::{Part, ProcessGroup, Reduction};
use parking_lot::Mutex;

use crate::device;
use crate::error::Error;
use crate::generation::{Copied, Generation, State};
use crate::gradient_hook::GradientHook;
use crate::offload::Offload;
use crate::policy::DivideFactors;
use crate::root::Root;
use crate::slot::{Holding, Slot};
use crate::transport::{self, cast};

/// How much deeper a unit's gathers are than the use before it, at first: more than the depth of a
/// transformer block.
const FIRST_STRIDE: usize = 64;
/// A stride never grows beyond this.
const LONGEST_STRIDE: usize = 1 << 12;
/// Stands for the first stride where length has not helped.
const HOPELESS: usize = 0;

/// Whether full weights stay from forward to backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// They are dropped after forward and gathered again.
    No,
    /// They stay, because this is the root: no longer so below another root.
    AsRoot,
    /// They stay, by the strategy.
    Always,
}

/// The groups that a unit's operations go through.
#[derive(Clone)]
pub(crate) struct Groups {
    /// The ranks that hold the shards.
    pub(crate) shard: ProcessGroup,
    /// The same ranks, for reductions.
    pub(crate) reduce: ProcessGroup,
    /// The ranks that hold the same shards, with hybrid sharding.
    pub(crate) replicas: Option<ProcessGroup>,
    /// The neighbours that share the full parameters between forward and backward, where that are
    /// fewer than hold the shards.
    pub(crate) neighbours: Option<ProcessGroup>,
}

/// How a unit treats its gradients.
#[derive(Clone, Default)]
pub(crate) struct Gradients {
    pub(crate) factors: Option<DivideFactors>,
    pub(crate) hook: Option<GradientHook>,
}

/// What may be switched between steps, on all ranks alike.
pub(crate) struct Switches {
    /// Gradients are reduced after backward; otherwise they stay on this rank.
    pub(crate) sync: AtomicBool,
    /// Reduced gradients cross to the replicas; otherwise they wait.
    pub(crate) all_reduce: AtomicBool,
    /// Full parameters are dropped when backward is through with them.
    pub(crate) reshard_after_backward: AtomicBool,
}

/// A unit of a sharded module, on one rank.
pub(crate) struct Unit {
    name: Mutex<String>,
    /// Its parameters, in the order of the module.
    pub(crate) slots: Vec<Slot>,
    /// The ranks that hold the shards.
    pub(crate) group: ProcessGroup,
    /// All groups that its operations go through.
    pub(crate) groups: Groups,
    /// Where its shards live, if not where it computes.
    pub(crate) offload: Option<Offload>,
    /// What is done to gradients.
    pub(crate) gradients: Gradients,
    /// What may be switched between steps.
    pub(crate) switches: Switches,
    /// Whether `replicate` made it.
    pub(crate) is_replica: bool,
    keep: Mutex<Keep>,
    /// The autodiff strategy of the device that the module was built on, which Burn's
    /// `valid().train()` forgets.
    pub(crate) strategy: Option<GradientCheckpointingStrategy>,
    /// Position in the root's list.
    pub(crate) index: AtomicUsize,
    stride: AtomicUsize,
    root: Mutex<Option<Arc<Root>>>,
    generations: Mutex<Vec<Weak<Generation>>>,
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
    /// A unit that belongs to no root yet.
    pub(crate) fn new(
        name: String,
        slots: Vec<Slot>,
        groups: Groups,
        keep: Keep,
        strategy: Option<GradientCheckpointingStrategy>,
    ) -> Self {
        Self {
            name: Mutex::new(name),
            slots,
            group: groups.shard.clone(),
            groups,
            offload: None,
            gradients: Gradients::default(),
            switches: Switches {
                sync: AtomicBool::new(true),
                all_reduce: AtomicBool::new(true),
                reshard_after_backward: AtomicBool::new(true),
            },
            is_replica: false,
            keep: Mutex::new(keep),
            strategy,
            index: AtomicUsize::new(0),
            stride: AtomicUsize::new(FIRST_STRIDE),
            root: Mutex::new(None),
            generations: Mutex::default(),
        }
    }

    /// The path of its module, for messages and labels.
    pub(crate) fn label(&self) -> String {
        let name = self.name.lock();
        match name.is_empty() {
            true => "root".to_owned(),
            false => name.clone(),
        }
    }

    /// Whether full weights stay from forward to backward.
    pub(crate) fn keeps(&self) -> bool {
        *self.keep.lock() != Keep::No
    }

    /// Whether full weights are dropped after forward from now on.
    pub(crate) fn set_keeps(&self, keeps: bool) {
        *self.keep.lock() = match keeps {
            true => Keep::Always,
            false => Keep::No,
        };
    }

    /// Whether gradients are reduced after backward.
    pub(crate) fn syncs(&self) -> bool {
        self.switches.sync.load(Ordering::Relaxed)
    }

    /// One empty place for each slot.
    pub(crate) fn places<T>(&self) -> Vec<Option<T>> {
        self.slots.iter().map(|_| None).collect()
    }

    /// How the gradients of the ranks become one: their mean, or by the policy's factors.
    pub(crate) fn averaging(&self) -> Reduction {
        let replicas = self.groups.replicas.as_ref().map_or(1, ProcessGroup::size);
        averaging(self.group.size() * replicas, self.gradients.factors)
    }

    /// Puts the unit, until now of a module of its own, below a root, at `prefix`.
    pub(crate) fn demote(&self, prefix: &str) {
        let mut name = self.name.lock();
        *name = match name.is_empty() {
            true => prefix.to_owned(),
            false => format!("{prefix}.{name}"),
        };
        let mut keep = self.keep.lock();
        if *keep == Keep::AsRoot {
            *keep = Keep::No;
        }
    }

    /// Position in the root's list.
    pub(crate) fn position(&self) -> usize {
        self.index.load(Ordering::Relaxed)
    }

    /// Hands the unit to `root`, under number `index`.
    pub(crate) fn join(&self, root: &Arc<Root>, index: usize) {
        *self.root.lock() = Some(root.clone());
        self.index.store(index, Ordering::Relaxed);
    }

    /// The root that orders its operations, once it has one.
    pub(crate) fn root(&self) -> Option<Arc<Root>> {
        self.root.lock().clone()
    }

    /// Bytes of the full parameters that a gather makes.
    pub(crate) fn gathered_bytes(&self) -> usize {
        let gathered = self.slots.iter().filter(|slot| slot.is_gathered());
        gathered.map(Slot::unsharded_bytes).sum()
    }

    /// Whether its use needs a gather at all.
    pub(crate) fn is_gathered(&self) -> bool {
        self.slots.iter().any(Slot::is_gathered)
    }

    /// How much deeper its gathers are than those of the use before it. A multiple of the first
    /// stride.
    pub(crate) fn stride(&self) -> usize {
        match self.stride.load(Ordering::Relaxed) {
            HOPELESS => FIRST_STRIDE,
            stride => stride,
        }
    }

    /// Lengthens the stride for the next step: the unit's gradients came after the next gather.
    /// Where even the longest does not help, the cause is not depth, and it is given up.
    pub(crate) fn deepen(&self) {
        let next = match self.stride.load(Ordering::Relaxed) {
            HOPELESS | LONGEST_STRIDE.. => HOPELESS,
            stride => stride * 2,
        };
        self.stride.store(next, Ordering::Relaxed);
    }

    /// Remembers a generation.
    pub(crate) fn adopt(&self, generation: &Arc<Generation>) {
        let mut generations = self.generations.lock();
        generations.retain(|known| known.strong_count() > 0);
        generations.push(Arc::downgrade(generation));
    }

    /// The values of the copy `copy` of the module: those that it holds, and for what it does not
    /// hold those of `otherwise`.
    pub(crate) fn values_of(
        &self,
        copy: u64,
        otherwise: Option<&Arc<Generation>>,
    ) -> Arc<Generation> {
        let live = self.live();
        let first = live.iter().find(|held| held.copies().contains(&copy));
        let otherwise = otherwise
            .or(first)
            .expect("asked for a copy that holds something");
        let sources: Vec<_> = (0..self.slots.len())
            .map(|slot| {
                let held = live.iter().rfind(|held| held.is_of(copy, slot));
                held.unwrap_or(otherwise).clone()
            })
            .collect();
        Generation::joined(&sources)
    }

    /// The values of the unit in the copy `copy` of the module.
    ///
    /// A clone of a part of a module knows nothing of the other units: it is taken for the copy that
    /// it was cloned from, and otherwise for the only one there is.
    pub(crate) fn in_copy(&self, copy: Copied) -> Option<Arc<Generation>> {
        let live = self.live();
        let mut copies: Vec<u64> = live.iter().flat_map(|held| held.copies()).collect();
        copies.sort_unstable();
        copies.dedup();
        let number = [copy.number, copy.parent]
            .into_iter()
            .find(|number| copies.contains(number))
            .or_else(|| (copies.len() == 1).then(|| copies[0]));
        if let Some(number) = number {
            return Some(self.values_of(number, None));
        }
        let mut held = live.into_iter().filter(|held| held.is_held());
        let first = held.next()?;
        held.all(|other| other.version() == first.version())
            .then_some(first)
    }

    fn live(&self) -> Vec<Arc<Generation>> {
        let generations = self.generations.lock();
        generations.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether any module holds a parameter of it.
    pub(crate) fn is_held(&self) -> bool {
        self.live().iter().any(|generation| generation.is_held())
    }

    /// The one generation in which modules hold the parameter of `slot` now.
    ///
    /// # Errors
    ///
    /// [`Error::AmbiguousCopy`] if copies with different values are alive.
    pub(crate) fn current(&self, slot: usize) -> Result<Arc<Generation>, Error> {
        let generations = self.generations.lock();
        let mut owned: Vec<_> = generations
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|generation| generation.owns(slot))
            .collect();
        owned.sort_by_key(|generation| generation.version());
        owned.dedup_by_key(|generation| generation.version());
        match owned.len() {
            1 => Ok(owned.swap_remove(0)),
            copies => Err(Error::AmbiguousCopy {
                unit: self.label(),
                copies,
            }),
        }
    }

    /// Drops all full parameters and cancels pending gathers.
    pub(crate) fn reshard_all(&self) {
        for generation in self.generations.lock().iter().filter_map(Weak::upgrade) {
            *generation.state.lock() = State::Sharded;
            *generation.pieces.lock() = None;
        }
    }

    /// Drops what forward has left for the neighbours' gathers.
    pub(crate) fn drop_pieces(&self) {
        for generation in self.generations.lock().iter().filter_map(Weak::upgrade) {
            *generation.pieces.lock() = None;
        }
    }

    /// This rank's shards, ready to be gathered, in the type that computes.
    pub(crate) fn shards(&self, generation: &Generation) -> Vec<Part> {
        self.gathered_slots()
            .map(|index| {
                let slot = &self.slots[index];
                let value = self.computing(generation, index);
                slot.part(transport::source(value, None), slot.compute_element)
            })
            .collect()
    }

    /// Where a shard lives whose full parameter is on `device`, with the autodiff of that.
    pub(crate) fn home(&self, device: &Device) -> Device {
        match &self.offload {
            Some(offload) => device::alike(&offload.host, device),
            None => device.clone(),
        }
    }

    /// What this rank holds of the parameter in slot `index`, in the type that computes.
    pub(crate) fn computing(&self, generation: &Generation, index: usize) -> Tensor<1> {
        cast(generation.plain(index), self.slots[index].compute)
    }

    /// The slots that a gather fills, in order.
    pub(crate) fn gathered_slots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.slots.len()).filter(|&index| self.slots[index].is_gathered())
    }

    /// The trainable slots whose gradients are reduced together with the unit, in order.
    pub(crate) fn reduced_slots(&self, generation: &Generation) -> Vec<usize> {
        (0..self.slots.len())
            .filter(|&index| self.slots[index].holding != Holding::Whole)
            .filter(|&index| generation.is_trainable(index))
            .collect()
    }

    /// The trainable slots whose gradients wait for the end of backward, in order.
    pub(crate) fn whole_slots(&self, generation: &Generation) -> Vec<usize> {
        (0..self.slots.len())
            .filter(|&index| self.slots[index].holding == Holding::Whole)
            .filter(|&index| generation.is_trainable(index))
            .collect()
    }
}

/// The mean over `ranks`, or what `factors` make of the sum.
pub(crate) fn averaging(ranks: usize, factors: Option<DivideFactors>) -> Reduction {
    match factors {
        Some(DivideFactors { pre, post }) => Reduction::sum()
            .pre_scaled(1.0 / pre)
            .post_scaled(1.0 / post),
        None => Reduction::mean(ranks),
    }
}
