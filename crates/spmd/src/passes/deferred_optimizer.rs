//! The split of a step whose optimizer runs in the next forward.
//!
//! It takes a graph with collectives whose optimizer is still at the end, and makes three.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use super::liveness::Liveness;
use super::pipeline::apply;
use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Update, rename};
use crate::pass_id::PassId;
use crate::transform::check_order;

/// First id of pending gradients: graphs of one step agree on their ids, whatever the batch.
const FIRST_PENDING: u64 = 1 << 40;

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
    /// Returns the three graphs, each with its [`Liveness`]. The given one has not had it.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerNotElementwise`] if the optimizer needs the other ranks; [`Error::PassOrder`] after
    /// [`EarlyOptimizer`](super::EarlyOptimizer) or [`Liveness`], or before collectives are inserted.
    pub fn split(self, graph: Graph) -> Result<Iteration, Error> {
        let parts = Parts::of(graph)?;
        let finish = |graph: Graph| {
            let mut graph = graph;
            graph.mark_applied(PassId::DeferOptimizer);
            graph.sync_nodes();
            graph.prune();
            apply(&Liveness, graph)
        };
        Ok(Iteration {
            setup: finish(parts.setup())?,
            main: finish(parts.main())?,
            cleanup: finish(parts.cleanup())?,
        })
    }
}

/// Returns true if an update is the optimizer's: those of buffers are forward's.
fn of_optimizer(graph: &Graph, update: &Update) -> bool {
    let role = graph.value(update.into).map(|value| &value.role);
    matches!(role, Some(Role::Parameter(_) | Role::State { .. }))
}

/// The parts of a step.
struct Parts {
    /// The graph of the step without its nodes: values, parameters and updates.
    graph: Graph,
    /// The nodes of forward and backward.
    rest: Vec<Node>,
    /// The optimizer's nodes of each parameter, on pending gradients.
    optimizer: BTreeMap<Arc<str>, Vec<Node>>,
    /// The pending value of each gradient.
    pending: BTreeMap<TensorId, TensorId>,
    /// The new value of each parameter.
    new_values: BTreeMap<TensorId, TensorId>,
}

impl Parts {
    fn of(mut graph: Graph) -> Result<Self, Error> {
        let after = [PassId::InsertCollectives];
        let before = [PassId::EarlyOptimizer, PassId::Liveness];
        check_order(&graph, PassId::DeferOptimizer, &after, &before)?;
        let mut pending = BTreeMap::new();
        for parameter in graph.parameters().to_vec() {
            let Some(gradient) = parameter.gradient else {
                continue;
            };
            // Parameters that are added to each other share a gradient.
            if pending.contains_key(&gradient) {
                continue;
            }
            let given = TensorId::new(FIRST_PENDING + parameter.value.value());
            let mut value = graph
                .value(gradient)
                .cloned()
                .ok_or_else(|| Error::Internal(format!("{} has no gradient", parameter.path)))?;
            value.id = given;
            value.role = Role::Pending(parameter.path.clone());
            graph.insert_value(value);
            pending.insert(gradient, given);
        }
        let mut rest = Vec::new();
        let mut optimizer: BTreeMap<Arc<str>, Vec<Node>> = BTreeMap::new();
        for mut node in graph.take_nodes() {
            match (node.phase, node.path.clone()) {
                (Phase::Optimizer, Some(path)) if node.collective.is_some() => {
                    return Err(Error::OptimizerNotElementwise {
                        path: path.to_string(),
                        operation: format!("{} among the ranks", node.name()),
                    });
                }
                (Phase::Optimizer, Some(path)) => {
                    rename(&mut node.operation, &pending);
                    optimizer.entry(path).or_default().push(node);
                }
                _ => rest.push(node),
            }
        }
        // Some optimizers keep the first gradient as it is.
        let is_optimizers: Vec<bool> = graph
            .updates()
            .iter()
            .map(|u| of_optimizer(&graph, u))
            .collect();
        for (update, is_optimizers) in graph.updates_mut().iter_mut().zip(is_optimizers) {
            if let Some(given) = pending.get(&update.from).filter(|_| is_optimizers) {
                update.from = *given;
            }
        }
        let trained = graph.parameters().iter().filter(|p| !p.is_buffer);
        let values: Vec<TensorId> = trained.map(|p| p.value).collect();
        let updates = graph.updates().iter();
        let new_values = updates
            .filter(|update| values.contains(&update.into))
            .map(|update| (update.into, update.from))
            .collect();
        Ok(Self {
            graph,
            rest,
            optimizer,
            pending,
            new_values,
        })
    }

    fn feed_pending(&self, graph: &mut Graph) {
        let updates = self.pending.iter();
        let updates = updates.map(|(from, into)| Update {
            into: *into,
            from: *from,
        });
        graph.updates_mut().extend(updates);
    }

    fn setup(&self) -> Graph {
        let mut graph = self.graph.clone();
        graph.set_nodes(self.rest.clone());
        let kept: Vec<Update> = graph.updates().to_vec();
        let kept: Vec<Update> = kept
            .into_iter()
            .filter(|update| !of_optimizer(&graph, update))
            .collect();
        *graph.updates_mut() = kept;
        self.feed_pending(&mut graph);
        graph
    }

    fn main(&self) -> Graph {
        let mut graph = self.graph.clone();
        let mut parts = self.optimizer.clone();
        let paths: BTreeMap<TensorId, Arc<str>> = graph
            .parameters()
            .iter()
            .map(|parameter| (parameter.value, parameter.path.clone()))
            .collect();
        let mut scheduled = Vec::new();
        for node in &self.rest {
            for input in node.inputs() {
                let part = paths.get(&input).and_then(|path| parts.remove(path));
                scheduled.extend(part.unwrap_or_default());
            }
            let mut node = node.clone();
            rename(&mut node.operation, &self.new_values);
            scheduled.push(node);
        }
        scheduled.extend(parts.into_values().flatten());
        graph.set_nodes(scheduled);
        self.feed_pending(&mut graph);
        graph
    }

    fn cleanup(&self) -> Graph {
        let mut graph = self.graph.clone();
        graph.detach_batch();
        graph.set_nodes(self.optimizer.values().flatten().cloned().collect());
        let kept: Vec<Update> = graph.updates().to_vec();
        let kept: Vec<Update> = kept
            .into_iter()
            .filter(|update| of_optimizer(&graph, update))
            .collect();
        *graph.updates_mut() = kept;
        graph
    }
}
