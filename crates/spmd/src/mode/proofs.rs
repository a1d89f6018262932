//! The plans of a mode that are proved, and the plans that may run.

use super::Mode;
use super::certify::Certify;
use super::division::Division;
use crate::error::{Error, ProofError};
use crate::place::Expand;

impl Mode {
    /// Proves, before a plan runs, that it computes what was traced. Debug builds always prove small plans. A proof
    /// takes as long as tens of steps on one thread. It covers all ranks, one by one, and is the same on every rank. To
    /// prove a plan for many rows, use `certify_at`, which proves it at small shapes.
    ///
    /// The crate `burn-fsdp-certificate` makes the proofs, for steps that its functions compile. These are the
    /// functions that `burn_fsdp` exports. Other steps are rejected ([`ProofError::NoProver`]).
    ///
    /// With placements, operations for which only whole tensors are supported cannot be proved, and are rejected
    /// ([`Error::NotProvable`]).
    #[must_use]
    pub fn certified(mut self) -> Self {
        self.certified = Certify::Always;
        self
    }

    /// Restricts steps to proved plans, given by their certificates or fingerprints. A step with another plan is
    /// rejected before it changes anything ([`ProofError::Unproved`]). The ranks agree on the plan before they run it,
    /// so only one of them needs the certificates. This does not apply to evaluations.
    ///
    /// With `certify_at`, plans are proved before the run, at small shapes. A step whose optimizer has no states yet
    /// has a separate plan.
    #[must_use]
    pub fn proved(mut self, plans: impl IntoIterator<Item: Into<u64>>) -> Self {
        self.proved = Some(plans.into_iter().map(Into::into).collect());
        self
    }

    /// Returns the choice of which plans are proved.
    pub(crate) fn certify(&self) -> Certify {
        self.certified
    }

    /// Returns the placements of the batch, if a step is traced over the joined batch.
    pub(crate) fn joined(&self) -> Result<Option<&Expand>, Error> {
        match &self.division {
            Division::DataParallel(_) | Division::Hybrid { .. } => Ok(None),
            Division::Expand(_, expand) | Division::Least(Some(expand)) => Ok(Some(expand)),
            Division::Least(None) => Err(Error::Internal("placements are not decided".to_owned())),
        }
    }

    /// Rejects a plan with this fingerprint and number of nodes if only proved plans may run and it is not one of them.
    pub(crate) fn check_proved(&self, plan: u64, nodes: usize) -> Result<(), Error> {
        let proved = self.proved.as_ref();
        if proved.is_none_or(|proved| proved.contains(&plan)) {
            Ok(())
        } else {
            Err(ProofError::Unproved { nodes }.into())
        }
    }
}
