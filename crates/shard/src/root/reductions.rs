//! Reductions that are in progress.

use std::collections::VecDeque;
use std::sync::Arc;

use burn_fsdp_collectives::{Pending, Received, Reduction as Averaging};

use super::arrival::Arrival;
use crate::copies::Generation;
use crate::op::Reduced;

pub(super) struct Reduction {
    pub(super) pending: Pending<Received>,
    pub(super) generation: Arc<Generation>,
    pub(super) slots: Vec<usize>,
    /// The reduction to apply: a sum and its scaling.
    pub(super) mean: Averaging,
    pub(super) arrival: Arrival,
}

/// The reductions of the current step.
#[derive(Default)]
pub(super) struct Reductions {
    /// The reductions in progress, in the order in which they were started.
    pub(super) in_flight: VecDeque<Reduction>,
    /// Gradients of completed reductions, until they go into Burn's `Gradients`.
    pub(super) done: Vec<Reduced>,
}
