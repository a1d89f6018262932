//! The pass that frees every value at its last use.
//!
//! It runs last, because every other pass changes which node reads a value last.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{TensorId, TensorStatus};

use crate::error::Error;
use crate::graph::{Graph, Node, Stage, set_status};
use crate::pass_id::PassId;
use crate::place::owned_of;
use crate::transform::GraphTransform;

/// The pass that frees every value at its last use.
///
/// The last operation that reads a value takes it (`!` in the printed graph): the backend writes the result into its
/// memory or frees it. A drop frees a value that this operation reads twice, that a collective sends until its wait, or
/// that nothing reads. Values that must outlive the step ([`Graph::kept`]) are never taken. Parameters and states that
/// an update replaces are taken, so the optimizer can work in place.
///
/// ```text
/// before                          after
/// %2 = Float.Exp(%1)              %2 = Float.Exp(%1!)
/// %3 = NumericFloat.Mul(%2, %2)   %3 = NumericFloat.Mul(%2, %2)
///                                 drop %2
/// ```
///
/// It is the last pass, and determines which values are [absent](Graph::absent_on) on each rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Liveness;

impl GraphTransform for Liveness {
    fn id(&self) -> PassId {
        PassId::Liveness
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let kept = graph.kept();
        let mut last_use: BTreeMap<TensorId, usize> = BTreeMap::new();
        let nodes: Vec<Node> = graph
            .take_nodes()
            .into_iter()
            .filter(|node| !node.is_drop())
            .collect();
        let mut started: BTreeMap<TensorId, Vec<TensorId>> = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            last_use.extend(node.inputs().map(|input| (input, index)));
            match node.collective.as_ref().map(|collective| collective.stage) {
                Some(Stage::Start) => {
                    started.extend(
                        node.outputs()
                            .next()
                            .map(|key| (key, node.inputs().collect())),
                    );
                }
                // Other ranks read the sent values until the wait.
                Some(Stage::Wait) => {
                    let sources = node.inputs().next().and_then(|key| started.remove(&key));
                    last_use.extend(
                        sources
                            .unwrap_or_default()
                            .into_iter()
                            .map(|id| (id, index)),
                    );
                }
                _ => {}
            }
        }
        let mut ends_at: BTreeMap<usize, Vec<TensorId>> = BTreeMap::new();
        for (id, index) in &last_use {
            ends_at.entry(*index).or_default().push(*id);
        }
        let mut scheduled = Vec::with_capacity(nodes.len());
        for (index, mut node) in nodes.into_iter().enumerate() {
            let mut seen = BTreeSet::new();
            let mut twice = BTreeSet::new();
            for input in node.inputs() {
                if !seen.insert(input) {
                    twice.insert(input);
                }
            }
            let ends = |id: &TensorId| last_use.get(id) == Some(&index) && !kept.contains(id);
            set_status(&mut node.operation, |id| {
                if ends(&id) && !twice.contains(&id) {
                    TensorStatus::ReadWrite
                } else {
                    TensorStatus::ReadOnly
                }
            });
            let unread = |id: &TensorId| !last_use.contains_key(id) && !kept.contains(id);
            // The operation cannot take values that it reads twice or not at all.
            let ended = ends_at.remove(&index).unwrap_or_default().into_iter();
            let dropped = ended.filter(|id| ends(id) && (twice.contains(id) || !seen.contains(id)));
            let dropped: Vec<_> = dropped.chain(node.outputs().filter(unread)).collect();
            let phase = node.phase;
            scheduled.push(node);
            for id in dropped {
                scheduled.push(Node::drop_of(graph.read(id)?, phase));
            }
        }
        graph.set_nodes(scheduled);
        let owned = owned_of(&graph);
        graph.set_owned(owned);
        Ok(graph)
    }
}
