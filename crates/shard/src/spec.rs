//! The properties of a unit that are fixed for the life of the module.

use burn::tensor::{Device, GradientCheckpointingStrategy};
use burn_fsdp_collectives::{ProcessGroup, Reduction};
use burn_fsdp_mesh::Pattern;

use crate::device;
use crate::divide_factors::DivideFactors;
use crate::hooks::Hooks;
use crate::offload::Offload;
use crate::slot::{Slot, Slots};

/// The process groups of a unit's collectives.
#[derive(Clone)]
pub(crate) struct Groups {
    /// The ranks that hold the shards.
    pub(crate) shard: ProcessGroup,
    /// The group for reductions, with the same ranks.
    pub(crate) reduce: ProcessGroup,
    /// The ranks that hold the same shards, with hybrid sharding.
    pub(crate) replicas: Option<ProcessGroup>,
    /// The neighbours that share the full parameters between forward and backward; `None` if these are all ranks that
    /// hold the shards, or only this rank.
    pub(crate) neighbours: Option<ProcessGroup>,
}

pub(crate) struct UnitSpec {
    /// The unit's parameters, in module order.
    pub(crate) slots: Vec<Slot>,
    pub(crate) groups: Groups,
    /// The devices of the unit's shards and full parameters, if they differ.
    pub(crate) offload: Option<Offload>,
    pub(crate) hooks: Hooks,
    /// The autodiff strategy of the device that the module was built on, which Burn's `valid().train()` loses.
    pub(crate) strategy: Option<GradientCheckpointingStrategy>,
    /// True if `replicate` created the unit.
    pub(crate) is_replica: bool,
    /// The modules whose regions are recomputed; `None` for all.
    pub(crate) recomputed: Option<Vec<Pattern>>,
}

impl UnitSpec {
    pub(crate) fn empty_slots<T>(&self) -> Slots<T> {
        Slots::empty(self.slots.len())
    }

    /// Returns the bytes of the full parameters that a gather creates.
    pub(crate) fn gathered_bytes(&self) -> usize {
        let gathered = self.slots.iter().filter(|slot| slot.is_gathered());
        gathered.map(Slot::unsharded_bytes).sum()
    }

    /// Returns true if a region with the parameter in `slot` may be recomputed.
    pub(crate) fn is_recomputed(&self, slot: usize) -> bool {
        let path = &self.slots[slot].path;
        let selects = |patterns: &Vec<Pattern>| patterns.iter().any(|one| one.is_around(path));
        self.recomputed.as_ref().is_none_or(selects)
    }

    /// Returns true if a use of the unit requires a gather.
    pub(crate) fn is_gathered(&self) -> bool {
        self.slots.iter().any(Slot::is_gathered)
    }

    /// Returns the device of a shard whose full parameter is on `device`, with the autodiff setting of `device`.
    pub(crate) fn home(&self, device: &Device) -> Device {
        match &self.offload {
            Some(offload) => device::alike(&offload.host, device),
            None => device.clone(),
        }
    }

    /// Returns the slots that a gather fills, in order.
    pub(crate) fn gathered_slots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.slots.len()).filter(|&index| self.slots[index].is_gathered())
    }
}

/// Returns the reduction that computes the mean over `ranks` ranks, or applies `factors`.
pub(crate) fn averaging(ranks: usize, factors: Option<DivideFactors>) -> Reduction {
    match factors {
        Some(DivideFactors { pre, post }) => Reduction::sum()
            .pre_scaled(1.0 / pre)
            .post_scaled(1.0 / post),
        None => Reduction::mean(ranks),
    }
}
