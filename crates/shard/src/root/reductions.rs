//! Reductions that are in progress.

use std::collections::VecDeque;
use std::sync::Arc;

use burn_fsdp_collectives::{Account, BufferPool, Pending, Received, Reduction as Averaging};

use super::arrival::Arrival;
use super::by_hook::ByHook;
use crate::copies::Generation;
use crate::op::Reduced;

pub(super) struct Reduction {
    pub(super) generation: Arc<Generation>,
    pub(super) slots: Vec<usize>,
    pub(super) flight: Flight,
}

/// What computes a reduction that is in progress.
pub(super) enum Flight {
    Engine {
        pending: Pending<Received>,
        /// The reduction to apply: a sum and its scaling.
        mean: Averaging,
        arrival: Arrival,
    },
    Hook(ByHook),
}

/// The reductions of the current step.
#[derive(Default)]
pub(super) struct Reductions {
    /// The reductions in progress, in the order in which they were started.
    pub(super) in_flight: VecDeque<Reduction>,
    /// Gradients of completed reductions, until they go into Burn's `Gradients`.
    pub(super) done: Vec<Reduced>,
    /// Counts the reduced gradients of the current backward, until it ends or the optimizer has used them.
    pub(super) counted: BufferPool,
    /// The accounts of the gradients that are in Burn's `Gradients`, or will be.
    pub(super) accounts: Vec<Account>,
}

impl Reductions {
    /// Counts the bytes of reduced gradients until the accounts are dropped.
    pub(super) fn account(&self, gradients: &[Reduced]) -> Vec<Account> {
        let bytes = |reduced: &Reduced| {
            reduced.gradient.shape().num_elements() * reduced.gradient.dtype().size()
        };
        let gradients = gradients.iter();
        gradients
            .map(|reduced| self.counted.account(bytes(reduced)))
            .collect()
    }
}
