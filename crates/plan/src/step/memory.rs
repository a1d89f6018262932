//! The live bytes over the step.

use serde::Serialize;

use super::process::ProcessBytes;
use crate::category::Bytes;

/// The bytes while one node runs.
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
/// They are counted as in the executor's [`MemoryTable`](burn_fsdp_spmd::run::MemoryTable): by memory, not by tensor.
/// Views are free, and an operation that overwrites its operand allocates nothing new.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Bytes between steps.
    pub at_rest: Bytes,
    /// Peak bytes.
    pub peak: Bytes,
    /// The node at which `peak` is first reached, or `None` if that is when the batch is loaded.
    pub peak_node: Option<usize>,
    /// The moments of all nodes except drops, in order.
    pub moments: Vec<Moment>,
    /// Bytes that results did not need because they overwrote an operand.
    pub reused_in_place: u64,
}

impl MemoryPlan {
    /// Returns the peak bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.total()
    }

    /// Estimates the bytes that the rank takes of its process, with everything that no tensor uses.
    pub fn process(&self) -> ProcessBytes {
        ProcessBytes::of(self.peak_bytes())
    }

    /// Creates an empty plan for a step: bytes at rest, and bytes once the batch is loaded.
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
