//! The replay of a step without elements.

use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::Graph;

use super::heap::Heap;
use super::memory::MemoryPlan;
use crate::backend::Flex;

impl MemoryPlan {
    /// Plans the memory of a scheduled graph on that rank, in any step after the first two.
    ///
    /// The graph must have been through the [`Liveness`](burn_fsdp_spmd::passes::Liveness) pass: without
    /// it, nothing is freed.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] for a node that reads what nothing wrote.
    pub fn new(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, true)
    }

    /// Plans the memory as [`new`](Self::new) does, if no operation wrote over an operand.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn without_reuse(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, false)
    }

    fn simulate(graph: &Graph, rank: usize, is_reusing: bool) -> Result<Self, Error> {
        let mut heap = Heap::new((graph, rank), &Flex, is_reusing)?;
        // What a step leaves is what the next begins with. Where the memory of new parameters and states
        // comes from is usually as it was, and settled after two steps at most.
        for _ in 0..2 {
            let before = heap.state();
            let plan = heap.step(graph)?;
            if heap.state() == before {
                return Ok(plan);
            }
        }
        heap.step(graph)
    }
}
