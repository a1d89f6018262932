//! Seals: the checksums of values that lie in a rank's memory from one operation to another.

use std::fmt;

use crate::agreement::Checks;
use crate::{Error, Label, Operation, ProcessGroup};

/// The checksum of some bytes, and when it was taken. Who makes it with [`ProcessGroup::seal`](crate::ProcessGroup::seal)
/// keeps it beside the bytes, and holds the bytes or has them to itself, so that nobody else writes over them; what
/// [`ProcessGroup::check_seal`](crate::ProcessGroup::check_seal) then finds different has changed by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    pub(crate) checksum: u32,
    pub(crate) written: Moment,
}

/// A moment in the life of a rank: a step, and the operation that it had started last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moment {
    /// The step, as given to [`ProcessGroup::begin_step`](crate::ProcessGroup::begin_step), if it was.
    pub step: Option<u64>,
    /// The operation that the rank had started last, on any group; `None` before its first.
    pub after: Option<Operation>,
}

impl Seal {
    /// Returns true if the bytes are those that were sealed.
    pub(crate) fn is_of(&self, bytes: &[u8]) -> bool {
        Checks::of(bytes) == self.checksum
    }
}

impl ProcessGroup {
    /// Seals bytes that this rank holds; `None` where ranks do not compare bytes
    /// ([`Check::Agreement`](crate::Check::Agreement)).
    pub fn seal(&self, bytes: &[u8]) -> Option<Seal> {
        self.compares_bytes()
            .then(|| self.sealed(Checks::of(bytes)))
    }

    /// Looks whether bytes are those that were sealed, and ends the failure domain of the group if not. `what` says what
    /// they are: their kind, the path of their parameter, their unit. Not collective.
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
            written: Box::new(seal.written.clone()),
            found: Box::new(self.moment()),
            ledger: control.report(),
        };
        Err(control.end_with(rank, error))
    }

    /// Tells the other ranks, with this rank's next operation on the group, of a value that all of them must hold alike:
    /// those that hold something else than most are named by an [`Error::Diverged`] of the operation in which all have
    /// told. `number` is equal on all ranks for one state of one value, and used for no other. Nothing happens where
    /// ranks do not compare bytes.
    pub fn tell_replica(&self, number: u64, seal: &Seal, what: impl FnOnce() -> Label) {
        if self.compares_bytes() {
            self.hold_value((number, seal.checksum), what());
        }
    }
}

/// Prints as `in step 3 after all_gather "x" (operation 7 of group "world")`.
impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(step) = self.step {
            write!(f, "in step {step} ")?;
        }
        match &self.after {
            Some(operation) => write!(f, "after {operation}"),
            None => f.write_str("before its first operation"),
        }
    }
}
