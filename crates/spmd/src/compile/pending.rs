//! What is left of the last step, where nodes of it run in the next one.

use std::sync::Arc;

use super::cache::{Cleanup, Stepped};
use crate::graph::Graph;
use crate::trace::StepScalars;

/// What is left of a step, with the values that wait for it.
pub(super) struct Pending {
    pub(super) scalars: StepScalars,
    pub(super) stepped: Arc<Stepped>,
    /// The graph that does it alone.
    pub(super) cleanup: Arc<Cleanup>,
    /// Number of steps since nothing was left.
    pub(super) age: u64,
}

/// The graph that the next call runs, with its scalars.
pub(super) struct Prepared {
    pub(super) graph: Arc<Graph>,
    /// Fingerprint of the graph, equal on all ranks that run the same.
    pub(super) fingerprint: u64,
    /// Scalars that the graph runs with.
    pub(super) scalars: StepScalars,
    /// Scalars of the step before, for the nodes of the graph that are of that one.
    pub(super) before: Option<StepScalars>,
    /// Scalars of this step.
    pub(super) own: StepScalars,
    pub(super) stepped: Arc<Stepped>,
    /// True if what is left of the step before has to be done by itself first.
    pub(super) flushes: bool,
    /// What the graph leaves.
    pub(super) pending: Option<Pending>,
}
