//! The plans of a mode that are proved, and the plans that may run.

use super::Mode;
use super::certify::Certify;
#[cfg(test)]
use super::certify::Planted;
use super::division::Division;
use crate::certificate::{Certificate, Proof, work};
use crate::error::{Error, ProofError};
use crate::graph::Graph;

/// Maximum [`work`] of a step, over all ranks, for which a debug build proves the plan by default.
const SMALL_PLAN: u64 = 1 << 22;

impl Mode {
    /// Proves, before a plan runs, that it computes what was traced ([`Certificate`](crate::Certificate)). Debug builds
    /// always prove small plans. A proof takes as long as tens of steps on one thread. It covers all ranks, one by one,
    /// and is the same on every rank. To prove a plan for many rows, use [`certify_at`](crate::certify_at), which
    /// proves it at small shapes.
    ///
    /// With placements, operations for which only whole tensors are supported cannot be proved, and are rejected
    /// ([`Error::NotProvable`]).
    #[must_use]
    pub fn certified(mut self) -> Self {
        self.certified = Certify::Always;
        self
    }

    /// Restricts steps to proved plans. A step with another plan is rejected before it changes anything
    /// ([`ProofError::Unproved`]). The ranks agree on the plan before they run it, so only one of them needs the
    /// certificates. This does not apply to evaluations.
    ///
    /// With [`certify_at`](crate::certify_at), plans are proved before the run, at small shapes. A step whose optimizer
    /// has no states yet has a separate plan.
    #[must_use]
    pub fn proved<'a>(mut self, certificates: impl IntoIterator<Item = &'a Certificate>) -> Self {
        let plans = certificates.into_iter().map(|certificate| certificate.plan);
        self.proved = Some(plans.collect());
        self
    }

    /// Returns true if the plan of the step with this trace should be proved.
    pub(crate) fn is_proved(&self, traced: &Graph) -> bool {
        match self.certified {
            Certify::Never => false,
            Certify::Small => work(traced) * self.ranks.size() as u64 <= SMALL_PLAN,
            Certify::Always => true,
        }
    }

    /// Runs a proof of this mode's plans; returns `None` if they cannot be proved and no proof was requested.
    pub(crate) fn prove<T>(
        &self,
        with: impl FnOnce(&Proof<'_>) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let mesh = self.ranks.mesh()?;
        let joined = match &self.division {
            Division::DataParallel(_) | Division::Hybrid { .. } => None,
            Division::Expand(_, expand) | Division::Least(Some(expand)) => Some(expand),
            Division::Least(None) => {
                return Err(Error::Internal("placements are not decided".to_owned()));
            }
        };
        let proof = Proof {
            mesh: &mesh,
            clip: self.options.clip,
            joined,
        };
        match (with(&proof), self.certified) {
            (Err(Error::NotProvable { .. }), Certify::Small) => Ok(None),
            (result, _) => result.map(Some),
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

    /// Injects faults into the passes.
    #[cfg(test)]
    pub(crate) fn planting(mut self, planted: Planted) -> Self {
        self.planted = Some(planted);
        self
    }

    /// Returns the passes with injected faults.
    #[cfg(test)]
    pub(super) fn planted(&self, pipeline: crate::passes::Pipeline) -> crate::passes::Pipeline {
        match self.planted {
            Some(planted) => pipeline.replaced(planted),
            None => pipeline,
        }
    }
}
