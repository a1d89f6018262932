//! Divides a step into two halves that run separately: forward and backward, which produce pending gradients, and the
//! optimizer, which consumes them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Update, rename};

/// First id of pending gradients. All graphs of a step use the same ids, regardless of the batch.
const FIRST_PENDING: u64 = 1 << 40;

/// The halves of a step with the optimizer at the end.
pub(super) struct Halves {
    /// The graph of the step, without nodes.
    pub(super) graph: Graph,
    /// The nodes of forward and backward.
    pub(super) rest: Vec<Node>,
    /// The optimizer's nodes for each parameter, which read pending gradients.
    pub(super) optimizer: BTreeMap<Arc<str>, Vec<Node>>,
    /// The pending value of each gradient.
    pub(super) pending: BTreeMap<TensorId, TensorId>,
}

impl Halves {
    /// Divides a graph whose collectives are inserted.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerNotElementwise`] if the optimizer needs data from other ranks.
    pub(super) fn of(mut graph: Graph) -> Result<Self, Error> {
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
        // Some optimizers store the first gradient unchanged as a state.
        let mut updates = graph.updates().to_vec();
        for update in updates
            .iter_mut()
            .filter(|update| graph.is_of_optimizer(update))
        {
            update.from = pending.get(&update.from).copied().unwrap_or(update.from);
        }
        *graph.updates_mut() = updates;
        Ok(Self {
            graph,
            rest,
            optimizer,
            pending,
        })
    }

    /// Adds updates that store the gradients of a graph as pending, or the values to which `instead` maps gradients.
    pub(super) fn feed_pending(&self, graph: &mut Graph, instead: &BTreeMap<TensorId, TensorId>) {
        let updates = self.pending.iter();
        let updates = updates.map(|(from, into)| Update {
            into: *into,
            from: instead.get(from).copied().unwrap_or(*from),
        });
        graph.updates_mut().extend(updates);
    }

    /// Returns the graph of forward and backward. Gradients become pending.
    pub(super) fn gradients(&self) -> Graph {
        let mut graph = self.without_optimizer(self.rest.clone());
        self.feed_pending(&mut graph, &BTreeMap::new());
        graph
    }

    /// Returns the graph of these nodes, with only the updates of buffers.
    pub(super) fn without_optimizer(&self, nodes: Vec<Node>) -> Graph {
        let mut graph = self.graph.clone();
        graph.set_nodes(nodes);
        let mut updates = graph.updates().to_vec();
        updates.retain(|update| !graph.is_of_optimizer(update));
        *graph.updates_mut() = updates;
        graph
    }

    /// Returns the graph of the optimizer, which reads pending gradients.
    pub(super) fn update(&self) -> Graph {
        let mut graph = self.graph.clone();
        graph.detach_batch();
        graph.set_nodes(self.optimizer.values().flatten().cloned().collect());
        let mut updates = graph.updates().to_vec();
        updates.retain(|update| graph.is_of_optimizer(update));
        *graph.updates_mut() = updates;
        for parameter in graph.parameters_mut() {
            let pending = parameter.gradient.and_then(|id| self.pending.get(&id));
            parameter.gradient = pending.copied();
        }
        graph
    }
}
