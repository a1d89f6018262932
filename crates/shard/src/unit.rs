//! A unit: the parameters that are gathered, freed and reduced together.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::spec::UnitSpec;

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

/// What may be switched between steps, on all ranks alike.
pub(crate) struct Switches {
    /// Gradients are reduced after backward; otherwise they stay on this rank.
    pub(crate) sync: AtomicBool,
    /// Reduced gradients cross to the replicas; otherwise they wait.
    pub(crate) all_reduce: AtomicBool,
    /// Full parameters are dropped when backward is through with them.
    pub(crate) reshard_after_backward: AtomicBool,
}

/// A unit of a sharded module, on one rank: what it is, and what may change.
pub(crate) struct Unit {
    spec: UnitSpec,
    name: Mutex<String>,
    keep: Mutex<Keep>,
    /// What may be switched between steps.
    pub(crate) switches: Switches,
    /// Position in the root's list.
    index: AtomicUsize,
    stride: AtomicUsize,
    /// By slot: whether the optimizer of the module that begins with it has been tried.
    tried: Vec<AtomicBool>,
}

/// What it is.
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
    /// A unit that belongs to no root yet.
    pub(crate) fn new(name: String, keep: Keep, spec: UnitSpec) -> Self {
        Self {
            name: Mutex::new(name),
            keep: Mutex::new(keep),
            switches: Switches {
                sync: AtomicBool::new(true),
                all_reduce: AtomicBool::new(true),
                reshard_after_backward: AtomicBool::new(true),
            },
            index: AtomicUsize::new(0),
            stride: AtomicUsize::new(FIRST_STRIDE),
            tried: spec.slots.iter().map(|_| AtomicBool::new(false)).collect(),
            spec,
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

    /// Gives the unit its position in the root's list.
    pub(crate) fn set_position(&self, position: usize) {
        self.index.store(position, Ordering::Relaxed);
    }

    /// Position in the root's list.
    pub(crate) fn position(&self) -> usize {
        self.index.load(Ordering::Relaxed)
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

    /// Whether the optimizer of the module that begins with `slot` has been tried.
    pub(crate) fn is_tried(&self, slot: usize) -> bool {
        self.tried[slot].load(Ordering::Relaxed)
    }

    /// It has.
    pub(crate) fn set_tried(&self, slot: usize) {
        self.tried[slot].store(true, Ordering::Relaxed);
    }
}
