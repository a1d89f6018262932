//! Moves nodes of a step into the next step.
//!
//! The input is a graph with collectives, before the last passes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU64;

use burn_ir::TensorId;

use super::iteration_parts::{Iteration, Parts};
use super::pipeline::Pipeline;
use crate::error::{Error, MoveError};
use crate::graph::{Graph, Node, Stage};
use crate::pass_id::PassId;
use crate::transform::check_order;

/// A pass that moves nodes into the next step. It is called after collectives are joined, split and scheduled, once for
/// each graph that covers one batch. A step over several micro-batches keeps all its nodes.
///
/// It must depend on nothing but the graph, because all ranks must move the same nodes.
pub trait IterationMove: fmt::Debug + Send + Sync {
    /// Returns the name of the pass, as used in errors and [`Graph::applied`].
    fn id(&self) -> PassId;

    /// Returns the passes that must not have been applied before this one.
    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    /// Moves nodes of the step, see [`IterationGraph::move_to_next_iteration`].
    ///
    /// # Errors
    ///
    /// If the graph does not have the expected form.
    fn moves(&self, step: &mut IterationGraph) -> Result<(), Error>;
}

/// A step, and the nodes chosen to run in the next step.
///
/// ```
/// use burn_fsdp_spmd::Error;
/// use burn_fsdp_spmd::passes::{IterationGraph, IterationMove, PassId};
///
/// /// Moves only the head's part of the optimizer.
/// #[derive(Debug)]
/// struct MoveHead;
///
/// impl IterationMove for MoveHead {
///     fn id(&self) -> PassId {
///         PassId::User("move the head")
///     }
///
///     fn moves(&self, step: &mut IterationGraph) -> Result<(), Error> {
///         let nodes = step.graph().nodes().iter().enumerate();
///         let head = nodes.filter(|(_, node)| node.path.as_deref() == Some("head.weight"));
///         let head: Vec<usize> = head.map(|(index, _)| index).collect();
///         let before = step.first_read(&head);
///         step.move_to_next_iteration(head, before)
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct IterationGraph {
    graph: Graph,
    /// The moved nodes, each with the node before which it runs.
    moved: BTreeMap<usize, usize>,
    max_iterations: Option<NonZeroU64>,
    passes: Vec<PassId>,
}

impl IterationGraph {
    /// Wraps a step, without moving any node.
    pub fn new(graph: Graph) -> Self {
        Self {
            graph,
            moved: BTreeMap::new(),
            max_iterations: None,
            passes: Vec::new(),
        }
    }

    /// Applies a pass that moves nodes.
    ///
    /// # Errors
    ///
    /// [`Error::PassTwice`]; [`Error::PassOrder`] if collectives are not inserted, or after a pass that it must
    /// precede; the errors of the pass.
    pub fn then(mut self, pass: &dyn IterationMove) -> Result<Self, Error> {
        let id = pass.id();
        if self.passes.contains(&id) {
            return Err(Error::PassTwice { pass: id });
        }
        check_order(&self.graph, id, &[PassId::InsertCollectives], pass.before())?;
        pass.moves(&mut self)?;
        self.passes.push(id);
        Ok(self)
    }

    /// Returns true if nothing has been moved.
    pub(crate) fn is_whole(&self) -> bool {
        self.moved.is_empty()
    }

    /// Returns the step. Nothing is removed from it until it is [split](Self::split).
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns true if the node has been moved.
    pub fn is_moved(&self, node: usize) -> bool {
        self.moved.contains_key(&node)
    }

    /// Makes the moved nodes run at the end of every `steps`-th step since they last did so, instead of in the next
    /// step. If called several times, the smallest number applies.
    pub fn max_iterations(&mut self, steps: NonZeroU64) {
        let known = self.max_iterations.unwrap_or(steps);
        self.max_iterations = Some(known.min(steps));
    }

    /// Returns the node before which the given nodes must run in the next step; `None` if there is none. This is the
    /// first unmoved node that reads a value that they replace (parameter, state, buffer), or the place of a moved node
    /// that reads their results, whichever comes first.
    pub fn first_read(&self, nodes: &[usize]) -> Option<usize> {
        let moving: BTreeSet<usize> = nodes.iter().copied().collect();
        let outputs: BTreeSet<TensorId> = self.outputs(nodes.iter());
        let updates = self.graph.updates().iter();
        let replaced = updates.filter(|update| outputs.contains(&update.from));
        let replaced: BTreeSet<TensorId> = replaced.map(|update| update.into).collect();
        let all = self.graph.nodes().iter().enumerate();
        let read = all.filter_map(|(index, node)| {
            let reads = |of: &BTreeSet<TensorId>| node.inputs().any(|input| of.contains(&input));
            match self.moved.get(&index) {
                Some(before) => reads(&outputs).then_some(*before),
                None => (!moving.contains(&index) && reads(&replaced)).then_some(index),
            }
        });
        read.min()
    }

    /// Returns these nodes, and all nodes that read their results, directly or indirectly.
    pub fn with_readers(&self, nodes: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
        let mut found: BTreeSet<usize> = nodes.into_iter().collect();
        let mut written = self.outputs(found.iter());
        // Readers come after the nodes whose results they read.
        for (index, node) in self.graph.nodes().iter().enumerate() {
            if !found.contains(&index) && node.inputs().any(|input| written.contains(&input)) {
                found.insert(index);
                written.extend(node.outputs());
            }
        }
        found
    }

    fn outputs<'a>(&self, nodes: impl Iterator<Item = &'a usize>) -> BTreeSet<TensorId> {
        let nodes = nodes.filter_map(|index| self.graph.nodes().get(*index));
        nodes.flat_map(Node::outputs).collect()
    }

    /// Moves a subgraph into the next step, where it runs before the node `before`, or after all others if that is
    /// `None`. Its inputs from this step are kept until then. In the next step, later nodes read the new values of the
    /// parameters, states and buffers that it replaces.
    ///
    /// The subgraph must be a leaf: its results are read only by moved nodes, and replace parameters, states or buffers
    /// after the last node.
    ///
    /// # Errors
    ///
    /// [`MoveError`] if there are no nodes, or for the first node that cannot move. No node is then moved.
    pub fn move_to_next_iteration(
        &mut self,
        nodes: impl IntoIterator<Item = usize>,
        before: Option<usize>,
    ) -> Result<(), Error> {
        let nodes: BTreeSet<usize> = nodes.into_iter().collect();
        let end = self.graph.nodes().len();
        let before = before.unwrap_or(end);
        let first = nodes.first().copied().ok_or(MoveError::Nothing)?;
        let is_out = |node: usize| node >= end || self.is_moved(node);
        let refused = |node: usize, reason: &'static str| self.refused(node, reason);
        if let Some(node) = nodes.iter().find(|node| is_out(**node)) {
            return Err(refused(
                *node,
                "it does not exist, or has already been moved",
            ));
        }
        if before > end || nodes.contains(&before) || self.is_moved(before) {
            return Err(refused(
                first,
                "the node that it should run before does not exist, or moves",
            ));
        }
        for node in &nodes {
            if let Some(reason) = self.fault(*node, &nodes) {
                return Err(refused(*node, reason));
            }
        }
        let chosen: Vec<usize> = nodes.iter().copied().collect();
        if let Some(read) = self.first_read(&chosen).filter(|read| *read < before) {
            let replaced = self.graph.nodes()[read].name();
            return Err(MoveError::Late {
                node: first,
                operation: self.name(first),
                before,
                reader: read,
                reads: replaced,
            }
            .into());
        }
        self.moved
            .extend(nodes.into_iter().map(|node| (node, before)));
        Ok(())
    }

    /// Lets each of these moved nodes that starts a collective on only pending values run at the beginning of the next
    /// step, before the first unmoved node that does not start a collective.
    pub(super) fn start_early(&mut self, nodes: &[usize]) {
        let written = self.outputs(self.moved.keys());
        let all = self.graph.nodes();
        let starts = |node: &Node| {
            let stage = node.collective.as_ref().map(|of| of.stage);
            stage == Some(Stage::Start)
        };
        let mut staying = (0..all.len()).filter(|index| !self.is_moved(*index));
        let first = staying.find(|index| !starts(&all[*index]));
        for index in nodes {
            let node = all.get(*index).filter(|node| starts(node));
            let waits = node.is_some_and(|node| node.inputs().all(|id| !written.contains(&id)));
            if let (true, Some(first), Some(before)) = (waits, first, self.moved.get_mut(index)) {
                *before = first.min(*before);
            }
        }
    }

    fn name(&self, node: usize) -> String {
        let node = self.graph.nodes().get(node);
        node.map_or_else(String::new, Node::name)
    }

    fn refused(&self, node: usize, reason: &'static str) -> Error {
        let operation = self.name(node);
        MoveError::Node {
            node,
            operation,
            reason,
        }
        .into()
    }

    /// Returns the reason why a node cannot move together with `moving`, if there is one.
    fn fault(&self, index: usize, moving: &BTreeSet<usize>) -> Option<&'static str> {
        let node = &self.graph.nodes()[index];
        let moves = |index: &usize| moving.contains(index) || self.is_moved(*index);
        if node.draw.is_some() || (node.is_opaque() && node.collective.is_none()) {
            return Some(
                "its result may depend on the step in which it runs, as random numbers do",
            );
        }
        let is_wait = node.collective.as_ref().map(|of| of.stage) == Some(Stage::Wait);
        let mut writers = self.graph.nodes().iter().enumerate();
        if is_wait
            && let Some(input) = node.inputs().next()
            && !writers.any(|(at, other)| moves(&at) && other.outputs().any(|out| out == input))
        {
            return Some("it waits for a collective whose start is not moved");
        }
        let outputs: BTreeSet<TensorId> = node.outputs().collect();
        if self.graph.results().any(|id| outputs.contains(&id)) {
            return Some(if node.collective.is_some() {
                "it also produces a result of the step (join no collectives: Options::bucket)"
            } else {
                "it produces a result of the step"
            });
        }
        let mut readers = self.graph.nodes().iter().enumerate();
        let stays = readers
            .any(|(at, other)| !moves(&at) && other.inputs().any(|input| outputs.contains(&input)));
        stays.then_some("a node that is not moved reads its result")
    }

    /// Returns the three graphs, with the `last` passes applied to each. Neither these passes nor
    /// [`Liveness`](super::Liveness) may have been applied to the step.
    ///
    /// # Errors
    ///
    /// [`MoveError`] if nothing was moved, or if a node that runs earlier in the next step reads a moved node's result;
    /// the errors of the passes.
    pub fn split(self, last: &Pipeline) -> Result<Iteration, Error> {
        if self.moved.is_empty() {
            return Err(MoveError::Nothing.into());
        }
        let max_iterations = self.max_iterations;
        let passes = self.passes.clone();
        self.check_order_of_moved()?;
        let parts = Parts::of(self.graph, &self.moved)?;
        let finish = |mut graph: Graph| {
            for pass in &passes {
                graph.mark_applied(*pass);
            }
            graph.sync_nodes();
            graph.prune();
            last.run(graph)
        };
        Ok(Iteration {
            setup: finish(parts.setup())?,
            main: finish(parts.main())?,
            cleanup: finish(parts.cleanup())?,
            max_iterations,
            is_optimizer: parts.is_optimizer(),
        })
    }

    /// Rejects moved nodes that run, in the next step, before another moved node whose result they read.
    fn check_order_of_moved(&self) -> Result<(), Error> {
        let nodes = self.graph.nodes();
        let moved = self.moved.iter();
        let written: BTreeMap<TensorId, (usize, usize)> = moved
            .flat_map(|(index, before)| nodes[*index].outputs().map(|id| (id, (*index, *before))))
            .collect();
        for (index, before) in &self.moved {
            let mut inputs = nodes[*index].inputs().filter_map(|id| written.get(&id));
            if let Some((writer, at)) = inputs.find(|(_, at)| at > before) {
                return Err(MoveError::Late {
                    node: *writer,
                    operation: self.name(*writer),
                    before: *at,
                    reader: *index,
                    reads: self.name(*index),
                }
                .into());
            }
        }
        Ok(())
    }
}
