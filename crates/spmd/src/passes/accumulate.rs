//! Splits a step into micro-batches, whose gradients are summed before the optimizer runs.
//!
//! The input is a graph with collectives, in which the optimizer is still at the end. The output is three graphs.

use std::collections::BTreeMap;

use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId};

use super::clip::ClipGradients;
use super::halves::Halves;
use super::pipeline::Pipeline;
use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, rename};
use crate::pass_id::PassId;
use crate::transform::{GraphTransform, check_order};

/// The graphs of a step over several micro-batches.
#[derive(Debug, Clone)]
pub struct MicroSteps {
    /// The graph of the first micro-batch: forward and backward. Gradients become pending.
    pub first: Graph,
    /// The graph of every other micro-batch: each rank adds its part of the gradients to the pending ones.
    pub next: Graph,
    /// The graph that runs after the last micro-batch: it averages the pending gradients, clips the mean and runs the
    /// optimizer.
    pub update: Graph,
}

/// Splits a step into micro-batches. Pending gradients have the layout of parameters, so each rank sums only its part.
/// Every micro-batch runs all collectives of forward and backward.
///
/// ```text
/// next                                        update
/// ...                               backward  %32 = NumericFloat.MulScalar(%30)  optimizer
/// %10 = reduce_scatter(%7)          backward  %12 = NumericFloat.Sub(%0, %32)    optimizer
/// %31 = NumericFloat.Add(%30, %10)  backward  update %0 <- %12
/// update %30 <- %31
/// ```
#[derive(Debug, Clone)]
pub struct Accumulate {
    /// Number of micro-batches.
    pub num_batches: usize,
    /// Clipping of the averaged gradients; `None` for no clipping.
    pub clip: Option<ClipGradients>,
}

impl Accumulate {
    /// Returns the three graphs, with the `last` passes applied to each. Neither these passes nor
    /// [`Liveness`](super::Liveness) may have been applied to `graph`.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerNotElementwise`] if the optimizer needs data from other ranks; [`Error::PassOrder`] after
    /// [`ClipGradients`], [`EarlyOptimizer`](super::EarlyOptimizer) or [`Liveness`](super::Liveness), or before
    /// collectives are inserted; the errors of the clipping and of the `last` passes.
    /// collectives are inserted.
    pub fn split(self, graph: Graph, last: &Pipeline) -> Result<MicroSteps, Error> {
        let after = [PassId::InsertCollectives];
        let before = [
            PassId::ClipGradients,
            PassId::EarlyOptimizer,
            PassId::Liveness,
        ];
        check_order(&graph, PassId::Accumulate, &after, &before)?;
        let halves = Halves::of(graph)?;
        let finish = |graph: Graph| {
            let mut graph = graph;
            graph.mark_applied(PassId::Accumulate);
            graph.sync_nodes();
            graph.prune();
            last.run(graph)
        };
        let mut update = mean(halves.update(), self.num_batches)?;
        if let Some(clip) = &self.clip {
            // This half contains no collective of gradients that could be joined or split.
            update = clip.transform(update)?;
            update.mark_applied(clip.id());
        }
        Ok(MicroSteps {
            first: finish(halves.gradients())?,
            next: finish(next(&halves)?)?,
            update: finish(update)?,
        })
    }
}

/// Returns the graph of a micro-batch that is not the first.
fn next(halves: &Halves) -> Result<Graph, Error> {
    let mut graph = halves.without_optimizer(Vec::new());
    let mut sums = BTreeMap::new();
    let mut scheduled = Vec::with_capacity(halves.rest.len() + halves.pending.len());
    for node in &halves.rest {
        let phase = node.phase;
        scheduled.push(node.clone());
        for gradient in node.outputs() {
            let Some(pending) = halves.pending.get(&gradient) else {
                continue;
            };
            let (sum, node) = added(&mut graph, *pending, gradient, phase)?;
            scheduled.push(node);
            sums.insert(gradient, sum);
        }
    }
    graph.set_nodes(scheduled);
    halves.feed_pending(&mut graph, &sums);
    Ok(graph)
}

/// Returns the sum of a pending gradient and this micro-batch's gradient, with the node that computes it.
fn added(
    graph: &mut Graph,
    pending: TensorId,
    gradient: TensorId,
    phase: Phase,
) -> Result<(TensorId, Node), Error> {
    let (lhs, rhs) = (graph.read(pending)?, graph.read(gradient)?);
    let role = graph.value(gradient).map(|value| value.role.clone());
    let role = role.unwrap_or(Role::Temporary);
    let sum = graph.add_value(lhs.shape.to_vec(), lhs.dtype, role);
    let dtype = lhs.dtype;
    let out = graph.write(sum)?;
    let operation = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
    let node = Node::new(OperationIr::NumericFloat(dtype, operation), phase);
    Ok((sum, node))
}

/// Makes the optimizer read the mean of the gradients over the micro-batches instead of their sum.
fn mean(mut graph: Graph, num_batches: usize) -> Result<Graph, Error> {
    let mut means: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    let mut scheduled = Vec::new();
    for index in 0..graph.parameters().len() {
        let Some(sum) = graph.parameters()[index].gradient else {
            continue;
        };
        let mean = match means.get(&sum) {
            Some(known) => *known,
            None => {
                let lhs = graph.read(sum)?;
                let role = Role::Gradient(graph.parameters()[index].path.clone());
                let mean = graph.add_value(lhs.shape.to_vec(), lhs.dtype, role);
                let dtype = lhs.dtype;
                let operation = NumericOperationIr::MulScalar(ScalarOpIr {
                    lhs,
                    rhs: ScalarIr::Float(1.0 / num_batches as f64),
                    out: graph.write(mean)?,
                });
                let operation = OperationIr::NumericFloat(dtype, operation);
                scheduled.push(Node::new(operation, Phase::Optimizer));
                means.insert(sum, mean);
                mean
            }
        };
        graph.parameters_mut()[index].gradient = Some(mean);
    }
    scheduled.extend(graph.take_nodes().into_iter().map(|mut node| {
        rename(&mut node.operation, &means);
        node
    }));
    graph.set_nodes(scheduled);
    for update in graph.updates_mut() {
        update.from = means.get(&update.from).copied().unwrap_or(update.from);
    }
    Ok(graph)
}
