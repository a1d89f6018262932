//! The live bytes over the step.

use serde::Serialize;

use super::process::ProcessBytes;
use crate::category::Bytes;

/// The memory while one node runs, and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Index of the node in the schedule.
    pub node: usize,
    /// Live tensor bytes while the node runs, including its operands and results.
    pub during: Bytes,
    /// Live tensor bytes after the node.
    pub after: u64,
}

/// The live tensor bytes over one step on one rank.
///
/// Like the executor's [`MemoryTable`](burn_fsdp_spmd::run::MemoryTable), it counts allocations, not tensors. Views are
/// free, and an operation that overwrites its operand allocates nothing new.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Bytes between steps, by category.
    pub at_rest: Bytes,
    /// Bytes at the peak, by category.
    pub peak: Bytes,
    /// The node at which `peak` is first reached. `None` if it is reached when the batch is loaded, and in an
    /// extrapolated plan.
    pub peak_node: Option<usize>,
    /// One moment per node in order, excluding drops.
    pub moments: Vec<Moment>,
    /// Bytes saved by results that overwrite an operand.
    pub reused_in_place: u64,
}

impl MemoryPlan {
    /// Returns the bytes at the peak, over all categories.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.total()
    }

    /// Estimates the rank's share of its process's memory, including memory outside tensors.
    pub fn process(&self) -> ProcessBytes {
        ProcessBytes::of(self.peak_bytes())
    }

    /// Creates a plan without moments, from the bytes between steps and the bytes after the batch is loaded.
    pub(super) fn begin(at_rest: Bytes, live: Bytes, num_nodes: usize) -> Self {
        Self {
            at_rest,
            peak: live,
            peak_node: None,
            moments: Vec::with_capacity(num_nodes),
            reused_in_place: 0,
        }
    }

    pub(super) fn record(&mut self, moment: Moment) {
        if moment.during.total() > self.peak.total() {
            self.peak = moment.during;
            self.peak_node = Some(moment.node);
        }
        self.moments.push(moment);
    }
}
