//! The split of a step whose optimizer runs in the next forward.
//!
//! It takes a graph with collectives whose optimizer is still at the end, and makes three.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::halves::Halves;
use super::pipeline::Pipeline;
use crate::error::Error;
use crate::graph::{Graph, rename};
use crate::pass_id::PassId;
use crate::transform::check_order;

/// The graphs of a training whose optimizer runs in the forward of the next step.
#[derive(Debug, Clone)]
pub struct Iteration {
    /// The graph of the first step: forward and backward. Gradients become pending.
    pub setup: Graph,
    /// The graph of every other step: each parameter takes its pending gradient just before its first use, and backward
    /// makes the next ones.
    pub main: Graph,
    /// The graph after the last step: parameters take the pending gradients, and nothing else happens.
    pub cleanup: Graph,
}

/// The split of the optimizer by parameter: each part moves into the forward of the next step, to where the parameter
/// is read first. Between backward and the next forward nothing has to wait for all gradients, and a part runs beside
/// the gathers of the units before it.
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
/// In `setup` the optimizer is left out, in `cleanup` everything else. `%30` is the pending gradient of the
/// step before, which all three know by the same number.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeferOptimizer;

impl DeferOptimizer {
    /// Returns the three graphs, each after the passes that come last, which the given one has not had:
    /// [`Liveness`](super::Liveness) is among them.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerNotElementwise`] if the optimizer needs the other ranks; [`Error::PassOrder`] after
    /// [`EarlyOptimizer`](super::EarlyOptimizer) or [`Liveness`](super::Liveness), or before collectives are inserted.
    pub fn split(self, graph: Graph, last: &Pipeline) -> Result<Iteration, Error> {
        let after = [PassId::InsertCollectives];
        let before = [PassId::EarlyOptimizer, PassId::Liveness];
        check_order(&graph, PassId::DeferOptimizer, &after, &before)?;
        let halves = Halves::of(graph)?;
        let finish = |graph: Graph| {
            let mut graph = graph;
            graph.mark_applied(PassId::DeferOptimizer);
            graph.sync_nodes();
            graph.prune();
            last.run(graph)
        };
        Ok(Iteration {
            setup: finish(halves.gradients())?,
            main: finish(main(&halves))?,
            cleanup: finish(halves.update())?,
        })
    }
}

/// Returns the graph of the steps between the first and the last.
fn main(halves: &Halves) -> Graph {
    let mut graph = halves.graph.clone();
    let mut parts = halves.optimizer.clone();
    let paths: BTreeMap<TensorId, Arc<str>> = graph
        .parameters()
        .iter()
        .map(|parameter| (parameter.value, parameter.path.clone()))
        .collect();
    let mut scheduled = Vec::new();
    for node in &halves.rest {
        for input in node.inputs() {
            let part = paths.get(&input).and_then(|path| parts.remove(path));
            scheduled.extend(part.unwrap_or_default());
        }
        let mut node = node.clone();
        rename(&mut node.operation, &halves.new_values);
        scheduled.push(node);
    }
    scheduled.extend(parts.into_values().flatten());
    graph.set_nodes(scheduled);
    halves.feed_pending(&mut graph, &BTreeMap::new());
    graph
}
