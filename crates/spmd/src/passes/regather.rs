//! The pass that frees and regathers weights between visits of their unit.
//!
//! It comes after [`Deduplicate`](super::Deduplicate), which would merge the repeated gathers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use burn_ir::{BaseOperationIr, OperationIr, TensorId};

use super::rewrite::repeat;
use super::unit::unit_in;
use crate::error::Error;
use crate::graph::{
    Collective, CollectiveKind, Graph, Node, Payload, Phase, Storage, rename, storage_of,
};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that frees gathered weights after each visit of their unit and gathers them again for the next. Forward and
/// backward each have their own visits.
///
/// At most two units are gathered at a time. When a third begins, the weights of the first are freed, and a later use
/// gathers them again. The last two units of forward are the first of backward and stay. A unit that forward or
/// backward visits a second time stays until its last use there, in addition to the other two. Layers that run in a
/// loop are therefore gathered twice, not in every iteration. Views and casts of a weight are also created again,
/// because they would keep its memory. No later pass may merge equal gathers. After this pass, the verifier checks that
/// weights are freed before the unit after next begins.
///
/// ```text
/// before                            after
/// %9 = all_gather(%0)  [blocks.0]   %9 = all_gather(%0)
/// %4 = Float.Matmul(%1, %9)         %4 = Float.Matmul(%1, %9)
/// ... blocks.1, blocks.2 ...        ... blocks.1, blocks.2 ...
/// %7 = Float.Matmul(%6, %9)         %20 = all_gather(%0)
///                                   %7 = Float.Matmul(%6, %20)
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Regather;

impl GraphTransform for Regather {
    fn id(&self) -> PassId {
        PassId::Regather
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::Deduplicate]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Bucket, PassId::Split, PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let nodes = graph.take_nodes();
        let mut weights = Weights::of(&graph, &nodes);
        let mut scheduled = Vec::with_capacity(nodes.len());
        for (index, mut node) in nodes.into_iter().enumerate() {
            weights.now = (index, node.phase);
            if weights.is_source(&node) {
                // The node is emitted at its use.
                continue;
            }
            let used: Vec<TensorId> = node
                .inputs()
                .filter(|id| weights.sources.contains_key(id))
                .collect();
            let mut current = BTreeMap::new();
            for id in used {
                let now = weights.make(&mut graph, &mut scheduled, id, &node)?;
                current.insert(id, now);
            }
            rename(&mut node.operation, &current);
            scheduled.push(node);
        }
        graph.set_nodes(scheduled);
        graph.prune();
        Ok(graph)
    }
}

/// Gathered weights, and their views and casts.
struct Weights {
    /// The node that creates each value, and the unit of its weight.
    sources: BTreeMap<TensorId, (Node, Arc<str>)>,
    /// The units whose weights are currently gathered, oldest first.
    resident: VecDeque<Arc<str>>,
    /// The id of each value in the current visit of its unit.
    made: BTreeMap<Arc<str>, BTreeMap<TensorId, TensorId>>,
    /// The last node that uses each unit in each phase.
    last_uses: BTreeMap<(Arc<str>, Phase), usize>,
    /// Number of visits of each unit in each phase.
    visits: BTreeMap<(Arc<str>, Phase), usize>,
    /// Index and phase of the node that is being scheduled.
    now: (usize, Phase),
}

impl Weights {
    fn of(graph: &Graph, nodes: &[Node]) -> Self {
        let mut sources: BTreeMap<TensorId, (Node, Arc<str>)> = BTreeMap::new();
        for node in nodes {
            let unit: Option<Arc<str>> = match &node.collective {
                Some(collective) if is_gather(collective) => collective
                    .parts
                    .first()
                    .map(|part| unit_in(graph, &part.path).into()),
                Some(_) => None,
                None => match (follows(node), node.inputs().next()) {
                    (true, Some(input)) => sources.get(&input).map(|(_, unit)| unit.clone()),
                    _ => None,
                },
            };
            if let Some(unit) = unit {
                let outputs: Vec<_> = node.outputs().collect();
                sources.extend(
                    outputs
                        .into_iter()
                        .map(|id| (id, (node.clone(), unit.clone()))),
                );
            }
        }
        let mut last_uses = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            for (_, unit) in node.inputs().filter_map(|input| sources.get(&input)) {
                last_uses.insert((unit.clone(), node.phase), index);
            }
        }
        Self {
            sources,
            resident: VecDeque::new(),
            made: BTreeMap::new(),
            last_uses,
            visits: BTreeMap::new(),
            now: (0, Phase::Forward),
        }
    }

    fn is_source(&self, node: &Node) -> bool {
        node.outputs()
            .any(|output| self.sources.contains_key(&output))
    }

    /// Returns the id of a value in the current visit of its unit. Schedules the nodes that create the value if this
    /// visit does not have it yet.
    fn make(
        &mut self,
        graph: &mut Graph,
        scheduled: &mut Vec<Node>,
        id: TensorId,
        user: &Node,
    ) -> Result<TensorId, Error> {
        let missing = || Error::Internal(format!("%{} is not computed from a weight", id.value()));
        let (source, unit) = self.sources.get(&id).cloned().ok_or_else(missing)?;
        self.enter(&unit);
        if let Some(now) = self.made.get(&unit).and_then(|made| made.get(&id)) {
            return Ok(*now);
        }
        let mut map = BTreeMap::new();
        for input in source.inputs() {
            if self.sources.contains_key(&input) {
                let now = self.make(graph, scheduled, input, user)?;
                map.insert(input, now);
            }
        }
        let mut node = repeat(graph, &source, &mut map)?;
        node.phase = user.phase;
        scheduled.push(node);
        let made = self.made.entry(unit).or_default();
        made.extend(
            source
                .outputs()
                .filter_map(|output| Some((output, *map.get(&output)?))),
        );
        made.get(&id).copied().ok_or_else(missing)
    }

    /// Starts a visit, unless the unit is already gathered.
    fn enter(&mut self, unit: &Arc<str>) {
        if self.resident.contains(unit) {
            return;
        }
        self.resident.push_back(unit.clone());
        *self.visits.entry((unit.clone(), self.now.1)).or_default() += 1;
        while self
            .resident
            .iter()
            .filter(|unit| !self.stays(unit))
            .count()
            > 2
        {
            let oldest = self.resident.iter().position(|unit| !self.stays(unit));
            if let Some(gone) = oldest.and_then(|index| self.resident.remove(index)) {
                self.made.remove(&gone);
            }
        }
    }

    /// Returns true if a unit stays gathered until its last use in this phase, because the phase visits it again.
    fn stays(&self, unit: &Arc<str>) -> bool {
        let (index, phase) = self.now;
        let key = (unit.clone(), phase);
        let is_back = self.visits.get(&key).is_some_and(|visits| *visits > 1);
        is_back && self.last_uses.get(&key).is_some_and(|last| *last >= index)
    }
}

/// Returns true if a collective gathers weights.
pub(super) fn is_gather(collective: &Collective) -> bool {
    collective.kind == CollectiveKind::AllGather && collective.payload == Payload::Parameter
}

/// Returns true if a node creates a view or a cast of its only input.
pub(super) fn follows(node: &Node) -> bool {
    let is_cast = matches!(
        node.operation,
        OperationIr::BaseFloat(BaseOperationIr::Cast(_))
    );
    is_cast || matches!(storage_of(node), Storage::View(_))
}
