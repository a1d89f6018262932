//! The copies of a module that hold parameters of a generation.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Identifies a copy of a module. Operations on some or all of its parameters keep its number; a clone gets a different
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Copied {
    /// The number of the copy, equal for all its parameters.
    pub(crate) number: u64,
    /// The number of the copy that it was cloned from.
    pub(crate) parent: u64,
}

/// The number of references from each copy of the module to each parameter of a generation.
pub(crate) struct Holders {
    num_slots: usize,
    holds: Mutex<BTreeMap<u64, Vec<usize>>>,
}

impl Holders {
    /// Creates counts of zero for `num_slots` parameters.
    pub(super) fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            holds: Mutex::default(),
        }
    }

    /// Returns true if any module holds the parameter of `slot` in this generation.
    pub(crate) fn owns(&self, slot: usize) -> bool {
        let holders = self.holds.lock();
        holders.values().any(|slots| slots[slot] > 0)
    }

    /// Returns true if copy `copy` of the module holds the parameter of `slot` in this generation.
    pub(crate) fn is_of(&self, copy: u64, slot: usize) -> bool {
        let holders = self.holds.lock();
        holders.get(&copy).is_some_and(|slots| slots[slot] > 0)
    }

    /// Returns true if copy `copy` of the module holds all parameters of the unit in this generation.
    pub(crate) fn is_all_of(&self, copy: u64) -> bool {
        let holders = self.holds.lock();
        holders
            .get(&copy)
            .is_some_and(|slots| slots.iter().all(|&number| number > 0))
    }

    /// Returns the copies of the module that hold a parameter in this generation.
    pub(crate) fn copies(&self) -> Vec<u64> {
        self.holds.lock().keys().copied().collect()
    }

    /// Returns true if any module holds a parameter in this generation.
    pub(crate) fn is_held(&self) -> bool {
        !self.holds.lock().is_empty()
    }

    /// Adds a reference from copy `copy` to the parameter of `slot`.
    pub(crate) fn take_hold(&self, copy: u64, slot: usize) {
        let mut holders = self.holds.lock();
        let slots = holders
            .entry(copy)
            .or_insert_with(|| vec![0; self.num_slots]);
        slots[slot] += 1;
    }

    /// Removes a reference from copy `copy` to the parameter of `slot`.
    pub(crate) fn let_go(&self, copy: u64, slot: usize) {
        let mut holders = self.holds.lock();
        if let Some(slots) = holders.get_mut(&copy) {
            slots[slot] -= 1;
            if slots.iter().all(|&number| number == 0) {
                holders.remove(&copy);
            }
        }
    }
}
