//! The bytes that the process's allocator has beside the tensors, by kernel.

use std::collections::BTreeMap;

use serde::Serialize;

use super::memory::MemoryPlan;
use burn_fsdp_spmd::graph::Graph;

/// An operation that allocates beside its operands and results, all its nodes together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelScratch {
    /// Name, such as `Float.Matmul`.
    pub name: String,
    /// Number of its nodes that have scratch.
    pub times: u64,
    /// Maximum of the scratch bytes of one node.
    pub scratch: u64,
    /// Maximum of the bytes that the allocator has while one node runs: tensors, scratch and
    /// transport.
    pub allocated: u64,
}

impl KernelScratch {
    /// Lists all kernels with scratch, those first during which the allocator has most.
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
