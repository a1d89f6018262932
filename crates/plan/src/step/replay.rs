//! The replay of a step without elements.

use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::Graph;

use super::heap::Heap;
use super::memory::MemoryPlan;

impl MemoryPlan {
    /// Plans the memory of a scheduled graph on rank `rank`, for any step after the first two.
    ///
    /// The [`Liveness`](burn_fsdp_spmd::passes::Liveness) pass must have been applied to the graph. Without it,
    /// nothing is freed.
    ///
    /// # Errors
    ///
    /// [`Error::Internal`] for a node that reads a value that was never written; [`Error::Mesh`] if ranks own values
    /// and the graph does not have this rank.
    pub fn new(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, true)
    }

    /// Plans the memory like [`new`](Self::new), but as if no operation overwrote its operand.
    ///
    /// # Errors
    ///
    /// Same as [`new`](Self::new).
    pub fn without_reuse(graph: &Graph, rank: usize) -> Result<Self, Error> {
        Self::simulate(graph, rank, false)
    }

    fn simulate(graph: &Graph, rank: usize, is_reusing: bool) -> Result<Self, Error> {
        let mut heap = Heap::new(graph, rank, is_reusing)?;
        // A step begins with the state that the previous one left. New parameters and states usually get their memory
        // from the same source in every step; this settles after at most two steps.
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
