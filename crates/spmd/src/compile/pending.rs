//! The pending part of the last step, whose nodes run in the next one.

use std::sync::Arc;

use super::cache::{Cleanup, Stepped};
use crate::graph::Graph;
use crate::trace::StepScalars;

/// The pending part of a step, with the scalars and the graph to run it.
pub(super) struct Pending {
    pub(super) scalars: StepScalars,
    pub(super) stepped: Arc<Stepped>,
    /// The graph that does only the pending part.
    pub(super) cleanup: Arc<Cleanup>,
    /// Number of steps for which work has been pending.
    pub(super) age: u64,
}

/// The graph that the next call runs, with its scalars.
pub(super) struct Prepared {
    pub(super) graph: Arc<Graph>,
    /// Fingerprint of the graph, equal on all ranks that run the same graph.
    pub(super) fingerprint: u64,
    /// Scalars that the graph runs with.
    pub(super) scalars: StepScalars,
    /// Scalars of the previous step, for the graph's nodes that belong to it.
    pub(super) before: Option<StepScalars>,
    /// Scalars of this step.
    pub(super) own: StepScalars,
    pub(super) stepped: Arc<Stepped>,
    /// True if the previous step's pending part must run separately first.
    pub(super) flushes: bool,
    /// The part that the graph leaves pending.
    pub(super) pending: Option<Pending>,
}
