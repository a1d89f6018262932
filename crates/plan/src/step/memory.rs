//! The live bytes over the step.

use serde::Serialize;

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
    /// Bytes that the operation allocates and frees while it runs, in addition to its operands and results.
    pub scratch: u64,
    /// Bytes that the transport holds while the node runs, in addition to tensors.
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
    /// Maximum number of bytes that one operation allocates and frees while it runs, in addition to tensors of the
    /// graph. They are known for Burn's CPU backend with one thread per rank, and for custom operations that declare
    /// them.
    pub scratch: u64,
    /// Peak bytes with scratch and the transport's memory, as the process's allocator counts them.
    pub allocated: u64,
    /// The node at which `allocated` is first reached, or `None` if that is when the batch is loaded.
    pub allocated_node: Option<usize>,
    /// Maximum number of bytes that the transport holds in addition to tensors.
    pub transport: u64,
}

impl MemoryPlan {
    /// Returns the peak bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.total()
    }

    /// Creates an empty plan for a step: bytes at rest, bytes once the batch is loaded, and bytes held by the
    /// transport.
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
