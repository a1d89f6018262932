//! A rank's operations on seals: creating, checking and announcing them.

use super::process_group::ProcessGroup;
use burn_fsdp_rendezvous::{Checksums, Error, Label, Seal};

impl ProcessGroup {
    /// Seals bytes that this rank holds; `None` if ranks do not compare bytes
    /// ([`Check::Agreement`](crate::Check::Agreement)).
    pub fn seal(&self, bytes: &[u8]) -> Option<Seal> {
        self.compares_bytes()
            .then(|| self.sealed(Checksums::of(bytes)))
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
        if seal.is_of(bytes) {
            return Ok(());
        }
        let (rank, control) = (self.world_rank(), self.control());
        let error = Error::AlteredAtRest {
            what: what(),
            rank,
            written: Box::new(seal.written().clone()),
            found: Box::new(self.moment()),
            ledger: control.report(),
        };
        Err(control.end_with(rank, error))
    }

    /// Announces a value that must be the same on all ranks, with this rank's next operation on the group. If some
    /// ranks differ from the majority, the operation that carries the last announcement fails with an
    /// [`Error::Diverged`] that names them. All ranks must use the same `number` for the same state of a value, and for
    /// nothing else. Does nothing if ranks do not compare bytes.
    pub fn tell_replica(&self, number: u64, seal: &Seal, what: impl FnOnce() -> Label) {
        if self.compares_bytes() {
            self.hold_value((number, seal.checksums().together()), what());
        }
    }
}
