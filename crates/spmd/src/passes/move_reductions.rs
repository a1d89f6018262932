//! Moves chosen reductions of gradients, with their part of the optimizer, into the next step.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Arc;

use burn_fsdp_mesh::Pattern;

use super::iteration::{IterationGraph, IterationMove};
use crate::error::Error;
use crate::graph::{Graph, Node, Payload, Phase, Stage};
use crate::pass_id::PassId;

/// Moves the collectives that reduce the gradients of chosen parameters into the next step. Each moves with the part of
/// the optimizer that reads its result. The collectives start after the first gathers of the next step, and end before
/// the first read of these parameters, so the forward of earlier units hides them. Until then, each rank keeps its
/// whole gradients. Collectives that are not split ([`Options::prefetch`](super::schedule::Options::prefetch) is off),
/// and the second of two reductions in hybrid sharding, run directly before the first read, where nothing hides them.
///
/// A collective that several parameters share moves with all of them. If gradients are clipped, no reduction can move,
/// because their joint norm is a result of the step ([`MoveError::Node`](crate::MoveError::Node)). A step that reduces
/// no gradient of these parameters, because it does not use them or a single rank has them whole, stays unchanged. A
/// pattern that matches no parameter is rejected.
///
/// ```
/// use burn_fsdp_collectives::ProcessGroup;
/// use burn_fsdp_spmd::passes::MoveReductions;
/// use burn_fsdp_spmd::{Mode, Strategy};
///
/// let world = ProcessGroup::solo();
/// let mode = Mode::data_parallel(world, Strategy::FullShard);
/// // The parameters that forward reads last have the most work to hide behind.
/// let mode = mode.move_to_next_iteration(MoveReductions::of(["head.**"]));
/// ```
#[derive(Debug, Clone)]
pub struct MoveReductions {
    patterns: Vec<Pattern>,
    max_iterations: Option<NonZeroU64>,
}

impl MoveReductions {
    /// Chooses the parameters whose path matches one of these patterns.
    pub fn of<P: Into<Pattern>>(patterns: impl IntoIterator<Item = P>) -> Self {
        Self {
            patterns: patterns.into_iter().map(Into::into).collect(),
            max_iterations: None,
        }
    }

    /// Makes the moved nodes run at the end of a step at least every `steps` steps, see
    /// [`IterationGraph::max_iterations`].
    #[must_use]
    pub fn max_iterations(mut self, steps: NonZeroU64) -> Self {
        self.max_iterations = Some(steps);
        self
    }

    /// Returns true if a node begins the reduction of a chosen gradient.
    fn begins(&self, node: &Node) -> bool {
        node.collective.as_ref().is_some_and(|of| {
            let is_reduction = of.kind.contract().reduces && of.payload == Payload::Gradient;
            let mut parts = of.parts.iter();
            is_reduction && of.stage != Stage::Wait && parts.any(|part| self.means(&part.path))
        })
    }

    fn means(&self, path: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(path))
    }
}

impl IterationMove for MoveReductions {
    fn id(&self) -> PassId {
        PassId::MoveReductions
    }

    fn moves(&self, step: &mut IterationGraph) -> Result<(), Error> {
        let parameters = step.graph().parameters();
        // Not every step computes a gradient for every parameter, so patterns are matched against all of them.
        let weights = || parameters.iter().filter(|of| !of.is_buffer);
        let mut patterns = self.patterns.iter();
        let unmatched = patterns.find(|pattern| !weights().any(|of| pattern.matches(&of.path)));
        if let Some(pattern) = unmatched {
            let known: Vec<&str> = weights().map(|of| &*of.path).take(8).collect();
            return Err(Error::UnknownName {
                what: "parameter",
                name: pattern.to_string(),
                known: known.join(", "),
            });
        }
        let nodes = step.graph().nodes().iter().enumerate();
        let starts = nodes.filter(|(_, node)| self.begins(node));
        let starts: Vec<usize> = starts.map(|(index, _)| index).collect();
        for start in &starts {
            if step.is_moved(*start) {
                continue;
            }
            let mut nodes = step.with_readers([*start]);
            nodes.extend(rest_of_steps(step.graph(), &nodes));
            let moving: Vec<usize> = nodes.into_iter().filter(|of| !step.is_moved(*of)).collect();
            let before = step.first_read(&moving);
            step.move_to_next_iteration(moving, before)?;
        }
        step.start_early(&starts);
        if let Some(steps) = self.max_iterations {
            step.max_iterations(steps);
        }
        Ok(())
    }
}

/// Returns all of the optimizer's nodes for the parameters that these nodes update. Nodes that read only the parameter,
/// such as weight decay, are included.
fn rest_of_steps(graph: &Graph, nodes: &BTreeSet<usize>) -> Vec<usize> {
    let steps = |node: &Node| node.path.clone().filter(|_| node.phase == Phase::Optimizer);
    let chosen = nodes.iter().filter_map(|index| graph.nodes().get(*index));
    let paths: BTreeSet<Arc<str>> = chosen.filter_map(steps).collect();
    let all = graph.nodes().iter().enumerate();
    let of_paths = all.filter(|(_, node)| steps(node).is_some_and(|path| paths.contains(&path)));
    of_paths.map(|(index, _)| index).collect()
}
