//! Which plans of a mode are proved, and which may run.

use super::Mode;
use super::certify::Certify;
#[cfg(test)]
use super::certify::Planted;
use super::division::Division;
use crate::certificate::{Certificate, Proof, work};
use crate::error::{Error, ProofError};
use crate::graph::Graph;

/// Products of elements in a step on all ranks up to which a debug build proves a plan by itself.
const SMALL_PLAN: u64 = 1 << 22;

impl Mode {
    /// Proves of each plan, before it runs, that it computes what was traced
    /// ([`Certificate`](crate::Certificate)); debug builds prove small ones anyway. A proof takes tens of steps' time on
    /// one thread, for all ranks one after the other and the same on every rank. A plan for many rows is proved at small shapes by
    /// [`certify_at`](crate::certify_at).
    ///
    /// By placements, operations of which only whole tensors are known cannot be proved, and are refused
    /// ([`Error::NotProvable`]).
    #[must_use]
    pub fn certified(mut self) -> Self {
        self.certified = Certify::Always;
        self
    }

    /// Runs no plans of steps but those that were proved: a step with another is refused before it changes anything
    /// ([`ProofError::Unproved`]). The ranks agree on the plan before they run it, so that it is enough that one of them knows the
    /// certificates. Evaluations are no steps.
    ///
    /// With [`certify_at`](crate::certify_at) plans are proved before the run, at small shapes. A step whose optimizer has no
    /// states yet has a plan of its own.
    #[must_use]
    pub fn proved<'a>(mut self, certificates: impl IntoIterator<Item = &'a Certificate>) -> Self {
        let plans = certificates.into_iter().map(|certificate| certificate.plan);
        self.proved = Some(plans.collect());
        self
    }

    /// Returns true if the plan of a step that was traced so is to be proved.
    pub(crate) fn is_proved(&self, traced: &Graph) -> bool {
        match self.certified {
            Certify::Never => false,
            Certify::Small => work(traced) * self.ranks.size() as u64 <= SMALL_PLAN,
            Certify::Always => true,
        }
    }

    /// Makes a proof of plans of this mode; `None` if they cannot be proved, and were not asked to be.
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

    /// Refuses a plan of this fingerprint and so many nodes if it is none of those that were proved, where no others may run.
    pub(crate) fn check_proved(&self, plan: u64, nodes: usize) -> Result<(), Error> {
        let proved = self.proved.as_ref();
        match proved.is_none_or(|proved| proved.contains(&plan)) {
            true => Ok(()),
            false => Err(ProofError::Unproved { nodes }.into()),
        }
    }

    /// Plants a fault in passes.
    #[cfg(test)]
    pub(crate) fn planting(mut self, planted: Planted) -> Self {
        self.planted = Some(planted);
        self
    }

    /// Returns passes with the faults that are planted in them.
    #[cfg(test)]
    pub(super) fn planted(&self, pipeline: crate::passes::Pipeline) -> crate::passes::Pipeline {
        match self.planted {
            Some(planted) => pipeline.replaced(planted),
            None => pipeline,
        }
    }
}
