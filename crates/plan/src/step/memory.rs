//! The live bytes over the step.

use serde::Serialize;

use crate::category::Bytes;

/// The bytes while one node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Index of the node in the schedule.
    pub node: usize,
    /// Live tensor bytes while it runs, its operands and results included.
    pub during: Bytes,
    /// Live tensor bytes when it is done.
    pub after: u64,
    /// Bytes that the operation allocates and frees while it runs, beside its operands and results.
    pub scratch: u64,
    /// Bytes that the transport holds while it runs, beside those of tensors.
    pub transport: u64,
}

impl Moment {
    /// Returns the bytes that the process's allocator has while the node runs.
    pub fn allocated(&self) -> u64 {
        self.during.total() + self.scratch + self.transport
    }
}

/// The live tensor bytes over one step on one rank.
///
/// They are counted as the executor's [`MemoryTable`](burn_fsdp_spmd::run::MemoryTable) counts them: by memory, not
/// by tensor, so that views are free and an operation that writes over its operand makes nothing new.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Bytes between steps.
    pub at_rest: Bytes,
    /// Maximum of the bytes at once.
    pub peak: Bytes,
    /// The node at which `peak` is first reached; `None` if that is when the batch is loaded.
    pub peak_node: Option<usize>,
    /// The moments of all nodes but drops, in order.
    pub moments: Vec<Moment>,
    /// Bytes that results did not need, because they were written over an operand.
    pub reused_in_place: u64,
    /// Maximum of the bytes, beside those of tensors of the graph, that one operation allocates and
    /// frees while it runs: known of Burn's CPU backend with one thread per rank, and of operations
    /// that are not Burn's and say so.
    pub scratch: u64,
    /// Maximum of the bytes at once with scratch and with those that the transport holds, as the
    /// process's allocator counts them.
    pub allocated: u64,
    /// The node at which `allocated` is first reached; `None` if that is when the batch is loaded.
    pub allocated_node: Option<usize>,
    /// Maximum of the bytes that the transport holds beside those of tensors.
    pub transport: u64,
}

impl MemoryPlan {
    /// Returns the maximum of the bytes at once.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.total()
    }

    /// Makes an empty plan for a step: bytes at rest, bytes once the batch is loaded, bytes held by
    /// the transport.
    pub(super) fn begin(at_rest: Bytes, live: Bytes, transport: u64, num_nodes: usize) -> Self {
        Self {
            at_rest,
            peak: live,
            peak_node: None,
            moments: Vec::with_capacity(num_nodes),
            reused_in_place: 0,
            scratch: 0,
            allocated: live.total() + transport,
            allocated_node: None,
            transport,
        }
    }

    pub(super) fn record(&mut self, moment: Moment) {
        if moment.during.total() > self.peak.total() {
            self.peak = moment.during;
            self.peak_node = Some(moment.node);
        }
        if moment.allocated() > self.allocated {
            self.allocated = moment.allocated();
            self.allocated_node = Some(moment.node);
        }
        self.scratch = self.scratch.max(moment.scratch);
        self.transport = self.transport.max(moment.transport);
        self.moments.push(moment);
    }
}
