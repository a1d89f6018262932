//! The vault of a rank: the seals of all values that it keeps in memory between operations.
//!
//! A value is registered by its slot: its owner, its parameter and its kind. The address of its memory would not do,
//! because allocators reuse addresses, and the seal of a freed value would then be compared with another value.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::seal::Sealed;

/// The kind of a value at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RestKind {
    /// A value that is kept from step to step: a shard, a whole parameter, or any value of a compiled step.
    Value,
    /// A full parameter that was gathered.
    Full,
    /// A rank's piece of a full parameter, kept for a gather among neighbours.
    Piece,
    /// A full gradient that waits for another backward.
    HeldBack,
    /// A reduced gradient as it arrived.
    Arrived,
    /// A reduced gradient that waits for a reduction over replicas or for the last backward.
    Sum,
    /// One of the reduced gradients of a leaf, by number, until an optimizer reads it.
    Reduced(usize),
    /// A running state, from one backward to the next.
    Running,
    /// A tensor of an optimizer's state.
    State,
}

/// The place of a value among the values of one owner: the number of its parameter, and its kind.
pub type VaultSlot = (u64, RestKind);

/// The seals of one rank's values, by owner and slot.
#[derive(Debug, Default)]
pub struct Vault(Mutex<Owners>);

#[derive(Debug, Default)]
struct Owners {
    /// Number of owners that were ever numbered.
    count: u64,
    sealed: BTreeMap<u64, BTreeMap<VaultSlot, Arc<Sealed>>>,
}

impl Vault {
    /// Returns a number for a new owner.
    pub fn number_owner(&self) -> u64 {
        let mut owners = self.0.lock();
        owners.count += 1;
        owners.count
    }

    /// Sets the seal of an owner's value; `None` removes it. Returns the seal that was there.
    pub fn set(
        &self,
        owner: u64,
        slot: VaultSlot,
        sealed: Option<Arc<Sealed>>,
    ) -> Option<Arc<Sealed>> {
        let mut owners = self.0.lock();
        match sealed {
            Some(sealed) => owners.sealed.entry(owner).or_default().insert(slot, sealed),
            None => owners.sealed.get_mut(&owner)?.remove(&slot),
        }
    }

    /// Returns the seal of an owner's value.
    pub fn get(&self, owner: u64, slot: VaultSlot) -> Option<Arc<Sealed>> {
        self.0.lock().sealed.get(&owner)?.get(&slot).cloned()
    }

    /// Removes the seals of the owner's values that `is_kept` rejects.
    pub fn retain(&self, owner: u64, mut is_kept: impl FnMut(VaultSlot) -> bool) {
        if let Some(sealed) = self.0.lock().sealed.get_mut(&owner) {
            sealed.retain(|slot, _| is_kept(*slot));
        }
    }

    /// Removes all seals of an owner.
    pub fn forget(&self, owner: u64) {
        self.0.lock().sealed.remove(&owner);
    }
}

#[cfg(test)]
mod tests {
    use super::super::checksum::Checksums;
    use super::super::seal::{Moment, Seal};
    use super::*;

    #[test]
    fn owners_and_kinds_do_not_share_slots() {
        let vault = Vault::default();
        let sealed = |byte| {
            let seal = Seal::new(Checksums::of(&[byte]), Moment::default());
            let what = "a value".into();
            Some(Arc::new(Sealed { seal, what }))
        };
        let is_of = |owner, slot, byte| {
            let found: Option<Arc<Sealed>> = vault.get(owner, slot);
            found.map(|found| found.seal.is_of(&[byte]))
        };
        let (one, other) = (vault.number_owner(), vault.number_owner());
        let (value, full) = ((3, RestKind::Value), (3, RestKind::Full));
        assert!(vault.set(one, value, sealed(1)).is_none());
        vault.set(one, full, sealed(2));
        vault.set(other, value, sealed(3));
        assert_eq!(is_of(one, value, 1), Some(true));
        assert_eq!(is_of(one, full, 2), Some(true));
        assert_eq!(is_of(other, value, 3), Some(true));
        assert!(vault.set(one, full, None).is_some());
        assert_eq!(is_of(one, full, 2), None);
        vault.retain(other, |slot| slot != value);
        assert_eq!(is_of(other, value, 3), None);
        vault.forget(one);
        assert_eq!(is_of(one, value, 1), None);
    }
}
