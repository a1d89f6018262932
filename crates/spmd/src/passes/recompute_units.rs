//! The pass that recomputes the forward of whole units in backward.
//!
//! It requires a graph without collectives: later passes gather the weights that backward then reads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn_fsdp_mesh::Pattern;
use burn_ir::TensorId;

use super::recompute::repeat_in_backward;
use super::regather::follows;
use super::unit::unit_in;
use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that keeps only the inputs and outputs of a unit's forward, and recomputes everything between in backward:
/// activation checkpointing. It does the same with the [regions](crate::trace::traced_region) that a loss marks.
///
/// A node of forward belongs to the unit whose weights it reads, or to the unit of the nodes before it. Values that
/// nodes outside the visit read are kept, and so are random draws. Recomputed values are bit-identical.
///
/// ```text
/// before (blocks.0 from %2 to %4)         after
/// %3 = Float.Matmul(%2, %0)   forward     %3 = Float.Matmul(%2, %0)   forward
/// %4 = Activation.Gelu(%3)    forward     %4 = Activation.Gelu(%3)    forward
/// ...                                     ...
/// %9 = Activation.GeluBackward(%3, %8)    %12 = Float.Matmul(%2, %0)  backward
///                                         %9 = Activation.GeluBackward(%12, %8)
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecomputeUnits {
    /// Patterns of the units to recompute, such as `blocks.*`.
    pub units: Vec<Pattern>,
}

impl GraphTransform for RecomputeUnits {
    fn id(&self) -> PassId {
        PassId::RecomputeUnits
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::AssignUnits]
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::Recompute,
            PassId::InsertCollectives,
            PassId::Liveness,
        ]
    }

    fn acts_on(&self, graph: &Graph) -> bool {
        !self.units.is_empty() || !graph.regions().is_empty()
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let names: BTreeSet<&str> = units(&graph).collect();
        for pattern in &self.units {
            if !names.iter().any(|name| pattern.matches(name)) {
                return Err(Error::UnknownName {
                    what: "unit to recompute",
                    name: pattern.to_string(),
                    known: names.into_iter().collect::<Vec<_>>().join(", "),
                });
            }
        }
        let chosen = self.chosen(&graph);
        repeat_in_backward(graph, &chosen)
    }
}

/// Returns the unit of each trained parameter.
fn units(graph: &Graph) -> impl Iterator<Item = &str> {
    let parameters = graph.parameters().iter();
    let parameters = parameters.filter(|parameter| !parameter.is_buffer);
    parameters.map(|parameter| unit_in(graph, &parameter.path))
}

impl RecomputeUnits {
    /// Returns the values to recompute, with the nodes that compute them.
    fn chosen(&self, graph: &Graph) -> BTreeMap<TensorId, Node> {
        let visits = unit_visits(graph);
        let is_chosen = |visit: &UnitVisit| self.units.iter().any(|unit| unit.matches(&visit.unit));
        let kept = graph.kept();
        let mut chosen = BTreeMap::new();
        let units = visits.iter().filter(|visit| is_chosen(visit));
        let units = units.map(|visit| visit.nodes.clone());
        for nodes in units.chain(regions(graph)) {
            let inside = |index: &usize| nodes.contains(index);
            let forward = graph.nodes().iter().enumerate();
            let forward = forward.filter(|(_, node)| node.phase == Phase::Forward);
            let outside = forward.filter(|(index, _)| !inside(index));
            let read: BTreeSet<TensorId> = outside.flat_map(|(_, node)| node.inputs()).collect();
            for index in &nodes {
                let node = &graph.nodes()[*index];
                let stays = |id: TensorId| read.contains(&id) || kept.contains(&id);
                if !node.is_opaque() && !node.outputs().any(stays) {
                    chosen.extend(node.outputs().map(|id| (id, node.clone())));
                }
            }
        }
        chosen
    }
}

/// Returns the nodes of forward in each region.
fn regions(graph: &Graph) -> impl Iterator<Item = BTreeSet<usize>> + '_ {
    graph.regions().iter().map(|region| {
        let nodes = graph.nodes().iter().enumerate();
        let forward = nodes.filter(|(_, node)| node.phase == Phase::Forward);
        let inside = forward.filter(|(_, node)| node.outputs().any(|id| region.contains(&id)));
        inside.map(|(index, _)| index).collect()
    })
}

/// The nodes of forward from the first that reads a unit's weights until the next that reads another unit's, except
/// views and casts of weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitVisit {
    /// The unit.
    pub unit: Arc<str>,
    /// Indices of the nodes.
    pub nodes: BTreeSet<usize>,
}

/// Returns the visits of units in forward, in order. Units come from [`AssignUnits`](super::AssignUnits), or from the
/// paths if that pass has not run.
pub fn unit_visits(graph: &Graph) -> Vec<UnitVisit> {
    let mut unit_of: BTreeMap<TensorId, Arc<str>> = BTreeMap::new();
    for value in graph.values() {
        if let Role::Parameter(path) = &value.role {
            unit_of.insert(value.id, unit_in(graph, path).into());
        }
    }
    let mut visits: Vec<UnitVisit> = Vec::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if node.phase != Phase::Forward {
            continue;
        }
        let unit = node.inputs().find_map(|id| unit_of.get(&id)).cloned();
        // A view or a cast of a weight belongs to its reader, because weights may be transposed long before their use.
        if let (true, Some(unit)) = (follows(node), &unit) {
            unit_of.extend(node.outputs().map(|id| (id, unit.clone())));
            continue;
        }
        match (unit, visits.last_mut()) {
            (None, None) => {}
            (Some(unit), Some(last)) if last.unit != unit => visits.push(UnitVisit {
                unit,
                nodes: BTreeSet::from([index]),
            }),
            (_, Some(last)) => {
                last.nodes.insert(index);
            }
            (Some(unit), None) => visits.push(UnitVisit {
                unit,
                nodes: BTreeSet::from([index]),
            }),
        }
    }
    visits
}
