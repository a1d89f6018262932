//! A rank's operations on seals: creating, checking and announcing them, and keeping them in the rank's vault.

use std::sync::Arc;

use super::process_group::ProcessGroup;
use burn_fsdp_rendezvous::{Checksums, Error, Label, Seal, Sealed, VaultSlot};

impl ProcessGroup {
    /// Seals bytes that this rank holds; `None` if ranks do not compare bytes
    /// ([`Check::Agreement`](crate::Check::Agreement)).
    pub fn seal(&self, bytes: &[u8]) -> Option<Seal> {
        let checked = self.0.checked.as_ref()?;
        Some(checked.sealed(Checksums::of(bytes)))
    }

    /// Checks that bytes match their seal, and ends the group's failure domain if not. `what` describes the bytes by
    /// kind, parameter path and unit. Not collective.
    ///
    /// # Errors
    ///
    /// [`Error::AlteredAtRest`].
    ///
    /// ```
    /// use burn_fsdp_collectives::{Check, Error, LaunchConfig, ProcessGroup, launch};
    ///
    /// fn body(world: ProcessGroup) -> Result<(), Error> {
    ///     let mut value = vec![1, 2, 3];
    ///     let seal = world.seal(&value).expect("ranks compare bytes here");
    ///     world.barrier("some work")?;
    ///     world.check_seal(&seal, &value, || "a value".to_owned())?;
    ///     value[2] ^= 1;
    ///     let found = world.check_seal(&seal, &value, || "a value".to_owned());
    ///     assert!(matches!(found, Err(Error::AlteredAtRest { .. })));
    ///     Ok(())
    /// }
    ///
    /// launch(LaunchConfig::new(1).check(Check::Agreement), body)?;
    /// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
    /// ```
    pub fn check_seal(
        &self,
        seal: &Seal,
        bytes: &[u8],
        what: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        match &self.0.checked {
            Some(checked) => checked.check_seal(seal, bytes, what),
            // Without a comparison there are no seals.
            None => Ok(()),
        }
    }

    /// Calls [`check_seal`](Self::check_seal) with the description of the sealed value.
    ///
    /// # Errors
    ///
    /// Same as `check_seal`.
    pub fn check_sealed(&self, sealed: &Sealed, bytes: &[u8]) -> Result<(), Error> {
        let what = || sealed.what.as_str().to_owned();
        self.check_seal(&sealed.seal, bytes, what)
    }

    /// Returns a keeper of seals for a new owner of values.
    pub fn keeper(&self) -> Keeper {
        Keeper {
            owner: self.0.state.vault().number_owner(),
            group: self.clone(),
        }
    }

    /// Announces a value that must be the same on all ranks, with this rank's next operation on the group. If some
    /// ranks differ from the majority, the operation that carries the last announcement fails with an
    /// [`Error::Diverged`] that names them. All ranks must use the same `number` for the same state of a value, and for
    /// nothing else. Does nothing if ranks do not compare bytes.
    pub fn tell_replica(&self, number: u64, seal: &Seal, what: impl FnOnce() -> Label) {
        if let Some(checked) = &self.0.checked {
            checked.hold_value((number, seal.checksums().together()), what());
        }
    }
}

/// The seals of the values of one owner, which are in its rank's vault. Dropping the keeper removes them. It is empty if
/// ranks do not compare bytes.
///
/// The owner also holds the values. A seal says nothing about memory that anything else may overwrite.
#[derive(Debug)]
pub struct Keeper {
    group: ProcessGroup,
    owner: u64,
}

impl Keeper {
    /// Returns a number that no other owner of the rank has.
    pub fn number(&self) -> u64 {
        self.owner
    }

    /// Returns the group that reports changed values.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Sets the seal of the value in `slot`; `None` removes it. `what` describes the value.
    pub fn keep(&self, slot: VaultSlot, seal: Option<Seal>, what: impl FnOnce() -> Label) {
        let sealed = |seal| Arc::new(Sealed { seal, what: what() });
        self.set(slot, seal.map(sealed));
    }

    /// Sets the seal of the value in `slot`, as another keeper or slot had it; `None` removes it.
    pub fn set(&self, slot: VaultSlot, sealed: Option<Arc<Sealed>>) {
        if self.group.compares_bytes() {
            self.group.0.state.vault().set(self.owner, slot, sealed);
        }
    }

    /// Returns the seal of the value in `slot`.
    pub fn get(&self, slot: VaultSlot) -> Option<Arc<Sealed>> {
        let state = &self.group.0.state;
        let is_used = self.group.compares_bytes();
        is_used.then(|| state.vault().get(self.owner, slot))?
    }

    /// Removes and returns the seal of the value in `slot`.
    pub fn take(&self, slot: VaultSlot) -> Option<Arc<Sealed>> {
        let state = &self.group.0.state;
        let is_used = self.group.compares_bytes();
        is_used.then(|| state.vault().set(self.owner, slot, None))?
    }

    /// Removes the seals of the slots that `is_kept` rejects.
    pub fn retain(&self, is_kept: impl FnMut(VaultSlot) -> bool) {
        if self.group.compares_bytes() {
            self.group.0.state.vault().retain(self.owner, is_kept);
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.group.0.state.vault().forget(self.owner);
    }
}
