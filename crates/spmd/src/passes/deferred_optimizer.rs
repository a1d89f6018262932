//! Moves the optimizer into the next step.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::iteration::{IterationGraph, IterationMove};
use super::iteration_parts::Iteration;
use super::pipeline::Pipeline;
use crate::error::Error;
use crate::graph::{Graph, Phase};
use crate::pass_id::PassId;

/// Moves the optimizer into the forward of the next step: each parameter's part runs before the first read of the
/// parameter. Unless gradients are clipped, no node then has to wait for all of them, and a part runs while earlier
/// units are gathered.
///
/// ```text
/// before                                     main
/// %9 = all_gather(%0)            forward     %12 = NumericFloat.Sub(%0, %30)   optimizer
/// %4 = Float.Matmul(%1, %9)      forward     %9 = all_gather(%12)              forward
/// ...                                        %4 = Float.Matmul(%1, %9)         forward
/// %10 = reduce_scatter(%7)       backward    ...
/// %12 = NumericFloat.Sub(%0, %10) optimizer  %10 = reduce_scatter(%7)          backward
/// update %0 <- %12                           update %0 <- %12, update %30 <- %10
/// ```
///
/// `setup` omits the optimizer, and `cleanup` omits everything else. `%30` is the pending gradient of the previous
/// step, and has the same id in all three graphs. Nodes that another pass has moved are not moved again.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeferOptimizer;

impl DeferOptimizer {
    /// Returns the three graphs, with the `last` passes applied to each. Neither these passes nor
    /// [`Liveness`](super::Liveness) may have been applied to `graph`.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerNotElementwise`] if the optimizer needs data from other ranks; [`Error::PassOrder`] after
    /// [`EarlyOptimizer`](super::EarlyOptimizer) or [`Liveness`](super::Liveness), or before collectives are inserted;
    /// the errors of [`IterationGraph::split`].
    pub fn split(self, graph: Graph, last: &Pipeline) -> Result<Iteration, Error> {
        IterationGraph::new(graph).then(&self)?.split(last)
    }
}

impl IterationMove for DeferOptimizer {
    fn id(&self) -> PassId {
        PassId::DeferOptimizer
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::EarlyOptimizer, PassId::Liveness]
    }

    fn moves(&self, step: &mut IterationGraph) -> Result<(), Error> {
        let mut parts: BTreeMap<Arc<str>, Vec<usize>> = BTreeMap::new();
        for (index, node) in step.graph().nodes().iter().enumerate() {
            let Some(path) = node.path.clone().filter(|_| node.phase == Phase::Optimizer) else {
                continue;
            };
            if node.collective.is_some() && !step.is_moved(index) {
                return Err(Error::OptimizerNotElementwise {
                    path: path.to_string(),
                    operation: format!("{} among the ranks", node.name()),
                });
            }
            if !step.is_moved(index) {
                parts.entry(path).or_default().push(index);
            }
        }
        for part in parts.into_values() {
            let before = step.first_read(&part);
            step.move_to_next_iteration(part, before)?;
        }
        Ok(())
    }
}
