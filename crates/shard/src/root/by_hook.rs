//! Reductions of a hook that are in progress.

use burn_fsdp_collectives::{Account, Reduction as Averaging};

use super::arrival::Arrived;
use crate::error::Error;
use crate::hooks::PendingTensors;

/// A reduction by a hook, in progress.
pub(super) struct ByHook {
    /// This rank's part of each sum, for the gradients that any rank has.
    pub(super) parts: PendingTensors,
    /// The notes of the ranks, which flag these gradients.
    pub(super) notes: Vec<Vec<u8>>,
    /// Number of gradients that the notes describe.
    pub(super) number: usize,
    /// The reduction that the hook computes, and its number of ranks.
    pub(super) reduction: (Averaging, usize),
    /// The memory of the gradients, which is counted until they are reduced.
    pub(super) accounts: Vec<Account>,
}

impl ByHook {
    /// Waits for the sums.
    pub(super) fn wait(self) -> Result<Arrived, Error> {
        let parts = self.parts.wait()?;
        drop(self.accounts);
        Ok(Arrived::by_hook(
            self.notes,
            self.reduction,
            self.number,
            parts,
        ))
    }
}
