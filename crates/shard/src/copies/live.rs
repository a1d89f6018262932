//! Tracks the live copies of a unit, and which of their values belong together.

use std::sync::{Arc, Weak};

use super::generation::{Generation, Kin};
use super::holders::Copied;
use crate::error::Error;
use crate::unit::Unit;

/// A handle to a unit and all its generations.
#[derive(Clone)]
pub(crate) struct Copies {
    pub(crate) unit: Arc<Unit>,
    kin: Arc<Kin>,
}

/// A reference to [`Copies`] that does not keep the unit alive.
pub(crate) struct WeakCopies {
    unit: Weak<Unit>,
    kin: Arc<Kin>,
}

impl WeakCopies {
    /// Returns the unit's [`Copies`], if the unit still exists.
    pub(crate) fn upgrade(&self) -> Option<Copies> {
        Some(Copies {
            unit: self.unit.upgrade()?,
            kin: self.kin.clone(),
        })
    }
}

impl Copies {
    pub(crate) fn of(generation: &Generation) -> Self {
        Self {
            unit: generation.unit.clone(),
            kin: generation.kin.clone(),
        }
    }

    pub(crate) fn downgrade(&self) -> WeakCopies {
        WeakCopies {
            unit: Arc::downgrade(&self.unit),
            kin: self.kin.clone(),
        }
    }

    /// Returns the values of copy `copy` of the module: its own values, and `otherwise`'s where it has none.
    pub(crate) fn values_of(
        &self,
        copy: u64,
        otherwise: Option<&Arc<Generation>>,
    ) -> Arc<Generation> {
        let live = self.live();
        let first = live
            .iter()
            .find(|held| held.holders.copies().contains(&copy));
        let otherwise = otherwise
            .or(first)
            .expect("asked for a copy that holds something");
        let sources: Vec<_> = (0..self.unit.slots.len())
            .map(|slot| {
                let held = live.iter().rfind(|held| held.holders.is_of(copy, slot));
                held.unwrap_or(otherwise).clone()
            })
            .collect();
        Generation::joined(&sources)
    }

    /// Returns the values of the unit in copy `copy` of the module, if the copy holds the parameter of `slot`.
    pub(crate) fn held_by(&self, copy: u64, slot: usize) -> Option<Arc<Generation>> {
        let live = self.live();
        let mut live = live.iter();
        let is_held = live.any(|held| held.holders.is_of(copy, slot));
        is_held.then(|| self.values_of(copy, None))
    }

    /// Returns the values of the unit in copy `copy` of the module.
    ///
    /// A clone of a part of a module has no values for the other units. They are taken from the copy that it was cloned
    /// from, otherwise from the only existing copy, or from any copy if all hold equal values.
    pub(crate) fn in_copy(&self, copy: Copied) -> Option<Arc<Generation>> {
        let live = self.live();
        let mut copies: Vec<u64> = live.iter().flat_map(|held| held.holders.copies()).collect();
        copies.sort_unstable();
        copies.dedup();
        let number = [copy.number, copy.parent]
            .into_iter()
            .find(|number| copies.contains(number))
            .or_else(|| (copies.len() == 1).then(|| copies[0]));
        if let Some(number) = number {
            return Some(self.values_of(number, None));
        }
        let mut held = live.into_iter().filter(|held| held.holders.is_held());
        let first = held.next()?;
        held.all(|other| other.version() == first.version())
            .then_some(first)
    }

    fn live(&self) -> Vec<Arc<Generation>> {
        self.kin.live()
    }

    pub(crate) fn is_held(&self) -> bool {
        self.live()
            .iter()
            .any(|generation| generation.holders.is_held())
    }

    /// Returns the only generation in which modules currently hold the parameter of `slot`.
    ///
    /// # Errors
    ///
    /// [`Error::AmbiguousCopy`] if copies with different values are alive.
    pub(crate) fn current(&self, slot: usize) -> Result<Arc<Generation>, Error> {
        let mut owned = self.live();
        owned.retain(|generation| generation.holders.owns(slot));
        owned.sort_by_key(|generation| generation.version());
        owned.dedup_by_key(|generation| generation.version());
        match owned.len() {
            1 => Ok(owned.swap_remove(0)),
            copies => Err(Error::AmbiguousCopy {
                unit: self.unit.label(),
                copies,
            }),
        }
    }

    /// Frees the values of `generation` in `slots` that no module holds, even if the generation is a joint view of
    /// others.
    pub(crate) fn free_replaced(&self, generation: &Generation, slots: &[usize]) {
        let live = self.live();
        for &slot in slots {
            let leaf = generation.node(slot);
            let is_held =
                |held: &Arc<Generation>| held.holders.owns(slot) && held.node(slot) == leaf;
            if !live.iter().any(is_held) {
                generation.free_replaced(slot);
            }
        }
    }

    /// Drops the full parameters of all copies with this version, and cancels their gathers.
    pub(crate) fn drop_full_of(&self, version: u64) {
        let copies = self.live().into_iter();
        let equal = copies.filter(|generation| generation.version() == version);
        equal.for_each(|generation| generation.life.drop_full());
    }

    pub(crate) fn drop_full(&self) {
        for generation in self.live() {
            generation.life.drop_full();
            generation.drop_pieces();
        }
    }

    /// Drops the pieces that forward left for gathers among neighbours.
    pub(crate) fn drop_pieces(&self) {
        for generation in self.live() {
            generation.drop_pieces();
        }
    }
}
