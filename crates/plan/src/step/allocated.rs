//! The bytes that the process's allocator has in addition to the tensors, by kernel.

use std::collections::BTreeMap;

use serde::Serialize;

use super::memory::MemoryPlan;
use burn_fsdp_spmd::graph::Graph;

/// An operation that allocates scratch memory, with all its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelScratch {
    /// Name of the operation, such as `Float.Matmul`.
    pub name: String,
    /// Number of nodes with scratch.
    pub times: u64,
    /// Maximum number of scratch bytes of one node.
    pub scratch: u64,
    /// Maximum number of bytes that the allocator has while one node runs: tensors, scratch and transport.
    pub allocated: u64,
}

impl KernelScratch {
    /// Lists all kernels with scratch, in descending order of the bytes that the allocator has while they run.
    pub(super) fn of_plan(graph: &Graph, plan: &MemoryPlan) -> Vec<Self> {
        let mut kernels = BTreeMap::<String, Self>::new();
        for moment in plan.moments.iter().filter(|moment| moment.scratch > 0) {
            let Some(node) = graph.nodes().get(moment.node) else {
                continue;
            };
            let name = node.name();
            let kernel = kernels.entry(name.clone()).or_insert(Self {
                name,
                times: 0,
                scratch: 0,
                allocated: 0,
            });
            kernel.times += 1;
            kernel.scratch = kernel.scratch.max(moment.scratch);
            kernel.allocated = kernel.allocated.max(moment.allocated());
        }
        let mut kernels: Vec<_> = kernels.into_values().collect();
        kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.allocated));
        kernels
    }
}
