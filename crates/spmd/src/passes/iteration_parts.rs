//! Splits a step into moved and unmoved nodes, and creates the three resulting graphs.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Update, rename};
use crate::place::types_of;

/// First id of pending values. All graphs of a step use the same ids for gradients, regardless of the batch.
const FIRST_PENDING: u64 = 1 << 40;

/// First id of pending values that are not gradients.
const FIRST_CARRIED: u64 = 1 << 41;

/// The graphs of a training run in which chosen nodes run in the next step.
#[derive(Debug, Clone)]
pub struct Iteration {
    /// The graph of the first step, without the moved nodes. Their inputs become pending.
    pub setup: Graph,
    /// The graph of every other step: the moved nodes belong to the previous step, and the others to this step.
    pub main: Graph,
    /// The graph after the last step: only the moved nodes.
    pub cleanup: Graph,
    /// The moved nodes run at the end of every so many steps, as after the last step; `None` for only after the last
    /// step.
    pub max_iterations: Option<NonZeroU64>,
    /// True if the moved nodes are exactly the optimizer's, which do not depend on the batch.
    pub(crate) is_optimizer: bool,
}

/// A step, divided into moved and unmoved nodes.
pub(super) struct Parts {
    /// The graph of the step, with pending values added and nodes removed.
    graph: Graph,
    /// The unmoved nodes, with their positions in the step.
    stays: Vec<(usize, Node)>,
    /// The moved nodes, which read pending values, in execution order. Each has the position before which it runs.
    moved: Vec<(usize, Node)>,
    /// The pending value for each value of this step that is carried over to the next.
    pending: BTreeMap<TensorId, TensorId>,
    /// The updates of the moved nodes.
    updates: Vec<Update>,
    /// All other updates.
    others: Vec<Update>,
}

impl Parts {
    /// Divides a step into moved nodes, each with its new place, and unmoved nodes.
    pub(super) fn of(mut graph: Graph, moved: &BTreeMap<usize, usize>) -> Result<Self, Error> {
        let types = types_of(&graph);
        let nodes: Vec<Node> = graph.take_nodes();
        let (mut moving, mut stays) = (Vec::new(), Vec::new());
        for (index, node) in nodes.into_iter().enumerate() {
            match moved.get(&index) {
                Some(before) => moving.push((*before, node)),
                None => stays.push((index, node)),
            }
        }
        let written: BTreeSet<TensorId> = moving.iter().flat_map(|(_, n)| n.outputs()).collect();
        let (mut updates, others) = divided_updates(&graph, &moving, &written);
        let mut read: BTreeSet<TensorId> = moving.iter().flat_map(|(_, n)| n.inputs()).collect();
        read.extend(updates.iter().map(|update| update.from));
        let waits = |id: &TensorId| {
            let role = graph.value(*id).map(|value| &value.role);
            let is_given = role.is_some_and(Role::is_given);
            match role {
                _ if written.contains(id) => false,
                Some(Role::Constant) => false,
                Some(Role::Input(_)) => true,
                // A given value without an update is the same in the next step. A given value that a moved node updates
                // is not updated yet.
                _ => !is_given || others.iter().any(|update| update.into == *id),
            }
        };
        let waiting: Vec<TensorId> = read.into_iter().filter(waits).collect();
        let mut pending = BTreeMap::new();
        for id in waiting {
            pending.insert(id, add_pending(&mut graph, id)?);
            if let Some(types) = types.get(&id) {
                graph.carry(pending[&id], types.clone());
            }
        }
        for (_, node) in &mut moving {
            rename(&mut node.operation, &pending);
            node.phase = Phase::Optimizer;
            node.scalars
                .iter_mut()
                .for_each(|slot| slot.is_of_before = true);
        }
        for update in &mut updates {
            update.from = pending.get(&update.from).copied().unwrap_or(update.from);
        }
        // Stable: nodes with the same place keep their order.
        moving.sort_by_key(|(before, _)| *before);
        Ok(Self {
            graph,
            stays,
            moved: moving,
            pending,
            updates,
            others,
        })
    }

    /// Returns true if the moved nodes are exactly the optimizer's.
    pub(super) fn is_optimizer(&self) -> bool {
        let is_step = |node: &Node| node.phase == Phase::Optimizer && node.path.is_some();
        let gradients: BTreeSet<TensorId> = self.gradients().collect();
        !self.stays.iter().any(|(_, node)| is_step(node))
            && self
                .moved
                .iter()
                .all(|(_, node)| node.path.is_some() && node.collective.is_none())
            && self.pending.keys().all(|id| gradients.contains(id))
            && !self
                .others
                .iter()
                .any(|update| self.graph.is_of_optimizer(update))
    }

    fn gradients(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.graph.parameters().iter().filter_map(|p| p.gradient)
    }

    /// Returns a graph of these nodes and updates. Gradients that no node writes are the pending ones.
    fn graph(&self, nodes: Vec<Node>, updates: Vec<Update>) -> Graph {
        let mut graph = self.graph.clone();
        let written: BTreeSet<TensorId> = nodes.iter().flat_map(Node::outputs).collect();
        for parameter in graph.parameters_mut() {
            let known = parameter.gradient;
            let pending = known.and_then(|id| self.pending.get(&id).copied());
            parameter.gradient = known.filter(|id| written.contains(id)).or(pending);
        }
        graph.set_nodes(nodes);
        *graph.updates_mut() = updates;
        graph
    }

    /// Returns the updates that make values pending for the next step.
    fn feeds(&self) -> impl Iterator<Item = Update> + '_ {
        let pending = self.pending.iter();
        pending.map(|(from, into)| Update {
            into: *into,
            from: *from,
        })
    }

    pub(super) fn setup(&self) -> Graph {
        let stays = self.stays.iter().map(|(_, node)| node.clone());
        let updates = self.others.iter().copied().chain(self.feeds());
        self.graph(stays.collect(), updates.collect())
    }

    pub(super) fn main(&self) -> Graph {
        let new: BTreeMap<TensorId, TensorId> = self
            .updates
            .iter()
            .map(|update| (update.into, update.from))
            .collect();
        let mut scheduled = Vec::with_capacity(self.stays.len() + self.moved.len());
        let mut moved = self.moved.iter().peekable();
        for (index, node) in &self.stays {
            while let Some((_, moved)) = moved.next_if(|(before, _)| before <= index) {
                scheduled.push(moved.clone());
            }
            let mut node = node.clone();
            rename(&mut node.operation, &new);
            scheduled.push(node);
        }
        scheduled.extend(moved.map(|(_, node)| node.clone()));
        let others = self.others.iter().map(|update| Update {
            from: new.get(&update.from).copied().unwrap_or(update.from),
            ..*update
        });
        let updates = self.updates.iter().copied().chain(others);
        let mut graph = self.graph(scheduled, updates.chain(self.feeds()).collect());
        let outputs = graph.outputs().clone();
        for (name, id) in outputs {
            graph.set_output(name, new.get(&id).copied().unwrap_or(id));
        }
        graph
    }

    pub(super) fn cleanup(&self) -> Graph {
        let moved = self.moved.iter().map(|(_, node)| node.clone());
        let mut graph = self.graph(moved.collect(), self.updates.clone());
        graph.detach_batch();
        graph
    }
}

/// Divides the updates of a step into the updates of moved nodes and all others. Some optimizers store a gradient or a
/// given value unchanged in a state. That update moves with the optimizer's nodes for the parameter.
fn divided_updates(
    graph: &Graph,
    moving: &[(usize, Node)],
    written: &BTreeSet<TensorId>,
) -> (Vec<Update>, Vec<Update>) {
    let steps = moving
        .iter()
        .filter(|(_, node)| node.phase == Phase::Optimizer);
    let paths: BTreeSet<&Arc<str>> = steps.filter_map(|(_, node)| node.path.as_ref()).collect();
    let moves = |update: &Update| {
        let role = graph.value(update.into).map(|value| &value.role);
        let from = graph.value(update.from).map(|value| &value.role);
        let is_kept = matches!(from, Some(Role::Gradient(_))) || graph.is_given(update.from);
        let path = role.and_then(Role::path);
        let is_of_step = graph.is_of_optimizer(update) && path.is_some_and(|p| paths.contains(p));
        written.contains(&update.from) || (is_of_step && is_kept)
    };
    graph.updates().iter().copied().partition(moves)
}

/// Declares the pending value that replaces `id` in the next step.
fn add_pending(graph: &mut Graph, id: TensorId) -> Result<TensorId, Error> {
    let mut owners = graph.parameters().iter();
    let owner = owners.find(|parameter| parameter.gradient == Some(id));
    let (pending, name) = match owner {
        Some(owner) => (FIRST_PENDING + owner.value.value(), owner.path.clone()),
        None => (
            FIRST_CARRIED + id.value(),
            format!("%{}", id.value()).into(),
        ),
    };
    let pending = TensorId::new(pending);
    let known = graph.value(id).cloned();
    let known = known.ok_or_else(|| Error::Internal(format!("%{} is not declared", id.value())));
    let mut value = known?;
    value.id = pending;
    value.role = Role::Pending(name);
    graph.insert_value(value);
    if let Some(placements) = graph.placements(id).map(<[_]>::to_vec) {
        graph.place(pending, placements);
    }
    Ok(pending)
}
