//! The uses of units in a forward, or in the second forward of a region.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use burn::tensor::Tensor;

use crate::copies::Generation;
use crate::error::Error;
use crate::region::SharedUse;
use crate::slot::Slots;
use crate::unit::Unit;

/// A parameter as one field of the module, since several fields may share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    /// Number of the field among those that share the parameter.
    pub(crate) field: usize,
}

impl Place {
    /// Returns the place of a parameter in its first field.
    pub(crate) fn own(slot: usize) -> Self {
        Self { slot, field: 0 }
    }
}

/// The forwards in progress, and the uses of units that wait for their backward.
#[derive(Default)]
pub(super) struct Uses {
    /// The tracked forward, if one is in progress.
    pub(super) pass: Option<Pass>,
    /// The second forward of a region, if one is in progress.
    pub(super) again: Option<Recomputation>,
    /// Uses whose gradients are not complete, each with its pass and unit.
    pub(super) open: BTreeMap<u64, (u64, Weak<Unit>)>,
}

/// One forward with autodiff, and the units that it used.
pub(super) struct Pass {
    pub(super) number: u64,
    /// The number of the module copy that started the pass.
    pub(super) copy: u64,
    /// The first parameter used, with its unit. Using it again after another unit begins a new pass.
    pub(super) first: (usize, Place),
    pub(super) left_first: bool,
    pub(super) token: Tensor<1>,
    /// The depth of the token's last link.
    pub(super) depth: usize,
    pub(super) current: Option<Use>,
    /// Uses of units that stay unsharded, to be continued when the unit is used again.
    pub(super) kept: Vec<Use>,
}

/// The second forward of a recomputed region, inside backward.
pub(super) struct Recomputation {
    pub(super) token: Tensor<1>,
    pub(super) depth: usize,
    pub(super) uses: Vec<Use>,
}

/// One use of a unit in a forward, until another unit is used. Each of its parameters has one autodiff node. Regions
/// inside the use get the parameters without nodes.
pub(super) struct Use {
    pub(super) shared: Arc<SharedUse>,
    pub(super) generation: Arc<Generation>,
    pub(super) token: Tensor<1>,
    pub(super) nodes: Slots<Node>,
}

/// A full parameter as an autodiff node: a `Tensor<D>` for some `D`.
pub(super) type Node = Box<dyn Any + Send>;

impl Use {
    /// Begins a use of a unit.
    pub(super) fn new(
        shared: Arc<SharedUse>,
        generation: &Arc<Generation>,
        token: &Tensor<1>,
    ) -> Self {
        Self {
            shared,
            generation: generation.clone(),
            token: token.clone(),
            nodes: generation.unit.empty_slots(),
        }
    }

    /// Prepares the use of a unit that stays unsharded to be continued later. Drops the weights that adapters computed,
    /// because these do not stay.
    pub(super) fn set_aside(mut self) -> Self {
        for (node, slot) in self.nodes.iter_mut().zip(&self.generation.unit.slots) {
            if slot.adapter.is_some() {
                *node = None;
            }
        }
        self
    }

    /// Drops the full parameters, unless the unit keeps them until backward.
    pub(super) fn close(self) -> Result<(), Error> {
        if self.generation.unit.keeps() {
            Ok(())
        } else {
            self.generation.reshard_after_forward()
        }
    }
}

impl Uses {
    /// Returns true if this rank will compute further gradients of `unit` in this backward, as far as the forward
    /// shows.
    pub(super) fn awaits(&self, unit: &Unit) -> bool {
        let mut open = self.open.values();
        open.any(|(_, of)| std::ptr::eq(of.as_ptr(), unit))
    }

    /// If a later use in the same pass is still open when `use_id` is gathered again, lengthens the stride of the unit
    /// of the first such use. That unit gets its gradients too late, because its token was not deep enough.
    pub(super) fn note_late_unit(&self, use_id: u64) {
        let Some(&(pass, _)) = self.open.get(&use_id) else {
            return;
        };
        let mut later = self.open.range(use_id + 1..);
        let late = later.find(|(_, (other, _))| *other == pass);
        if let Some(unit) = late.and_then(|(_, (_, unit))| Weak::upgrade(unit)) {
            unit.deepen();
        }
    }
}
