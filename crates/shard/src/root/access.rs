//! The calls from autodiff nodes to the root.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, Tensor};

use super::state::Root;
use crate::copies::Generation;
use crate::error::Error;
use crate::op::{Announce, Reduced, Weight};
use crate::region::SharedUse;
use crate::thrown::throw;

/// Gives backward access to one full parameter, for one use of its unit.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub(super) root: Arc<Root>,
    pub(super) generation: Arc<Generation>,
    pub(super) slot: usize,
    pub(super) use_id: u64,
    /// True if the full parameters stay until the use's backward.
    pub(super) stays: bool,
}

impl Weight for Access {
    fn shape(&self) -> Shape {
        Shape::from(self.generation.unit.slots[self.slot].shape.clone())
    }

    fn stays(&self) -> bool {
        self.stays
    }

    fn regather(&self) -> Result<Tensor<1>, Error> {
        let regather = |slot| self.root.regather(&self.generation, slot, self.use_id);
        let full = regather(self.slot)?;
        match &self.generation.unit.slots[self.slot].adapter {
            Some(adapter) => adapter.applied(full, regather),
            None => Ok(full),
        }
    }

    fn receive(&self, gradient: Tensor<1>) {
        let unit = &self.generation.unit;
        let Some(adapter) = &unit.slots[self.slot].adapter else {
            return self.root.receive(unit, self.slot, self.use_id, gradient);
        };
        let full = |slot| self.root.regather(&self.generation, slot, self.use_id);
        let gradients = adapter.gradients(self.slot, gradient, full);
        for (slot, gradient) in gradients.unwrap_or_else(|error| throw(error)) {
            if self.generation.is_trainable(slot) {
                self.root.receive(unit, slot, self.use_id, gradient);
            }
        }
    }
}

/// The milestone at which all gradients of one use of a unit have arrived.
#[derive(Debug)]
pub(super) struct UnitEnd {
    root: Arc<Root>,
    generation: Arc<Generation>,
    shared: Arc<SharedUse>,
}

impl UnitEnd {
    /// Creates the milestone for the use `shared` of the unit of `generation`.
    pub(super) fn new(
        root: &Arc<Root>,
        generation: &Arc<Generation>,
        shared: &Arc<SharedUse>,
    ) -> Arc<Self> {
        Arc::new(Self {
            root: root.clone(),
            generation: generation.clone(),
            shared: shared.clone(),
        })
    }
}

impl Announce for UnitEnd {
    fn reached(&self) -> Result<Vec<Reduced>, Error> {
        let reduced = self.root.unit_end(&self.generation, &self.shared)?;
        self.root.step_complete_units()?;
        Ok(reduced)
    }

    fn handed_over(&self, leaves: &[NodeId]) -> Result<(), Error> {
        self.root.handed_over(leaves);
        Ok(())
    }
}

/// The milestone of the first link, which backward reaches after all gathers' nodes.
#[derive(Debug)]
pub(super) struct Finish(pub(super) Arc<Root>);

impl Announce for Finish {
    fn reached(&self) -> Result<Vec<Reduced>, Error> {
        let reduced = self.0.finish()?;
        self.0.step_complete_units()?;
        Ok(reduced)
    }

    fn handed_over(&self, leaves: &[NodeId]) -> Result<(), Error> {
        self.0.handed_over(leaves);
        self.0.end_audit()
    }
}
