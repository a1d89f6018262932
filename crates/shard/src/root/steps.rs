//! The optimizer that steps in backward, and the units that it has stepped or will step.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn_fsdp_collectives::Account;

use crate::audit::announces_more;
use crate::copies::Generation;
use crate::error::Error;
use crate::op::Reduced;
use crate::probes::Trial;
use crate::unit::Unit;

/// The module and the optimizer of a program that steps in backward.
pub(crate) trait Steps: Send + Sync {
    /// Returns true if `leaf` is a parameter of the module.
    fn knows(&self, leaf: NodeId) -> bool;

    /// Updates the parameters in `slots` with their gradients, and frees both the gradients and the old values. The
    /// gradients that this rank does not hold are missing. `trial` tries the optimizer, if it has not been tried yet.
    fn step(
        &self,
        trial: &Trial,
        generation: &Arc<Generation>,
        slots: &[usize],
        gradients: Vec<Reduced>,
    ) -> Result<(), Error>;
}

/// The units of the current backward that are stepped before it ends, and those that wait.
pub(super) struct Early {
    pub(super) steps: Option<Arc<dyn Steps>>,
    /// True if the next backward may step: an earlier one did, or there was none.
    pub(super) is_likely: bool,
    has_stepped: bool,
    /// Units of which all gradients have arrived, until the optimizer steps them.
    pub(super) complete: Vec<Complete>,
    /// Units that were complete.
    pub(super) stepped: BTreeSet<usize>,
    /// Units with gradients that wait for the end of backward, or that some rank will reduce again.
    pub(super) waiting: BTreeSet<usize>,
}

/// A unit of which all gradients have arrived.
pub(super) struct Complete {
    pub(super) generation: Arc<Generation>,
    /// The slots that the unit's own reduction carries.
    pub(super) slots: Vec<usize>,
    pub(super) gradients: Vec<Reduced>,
    pub(super) accounts: Vec<Account>,
}

impl Default for Early {
    fn default() -> Self {
        Self {
            steps: None,
            is_likely: true,
            has_stepped: false,
            complete: Vec::new(),
            stepped: BTreeSet::new(),
            waiting: BTreeSet::new(),
        }
    }
}

impl Early {
    /// Reads in a reduction's notes whether any rank will reduce gradients of `unit` again.
    pub(super) fn hear(&mut self, unit: &Unit, notes: &[Vec<u8>]) {
        if announces_more(notes) {
            self.waiting.insert(unit.position());
        }
    }

    pub(super) fn end_backward(&mut self) {
        self.has_stepped |= self.steps.is_some();
        self.is_likely = self.has_stepped;
        self.stepped.clear();
        self.waiting.clear();
    }
}
