//! Casts between the storage types and compute types of parameters.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{BaseOperationIr, CastOpIr, OperationIr, TensorId};

use crate::graph::{Node, Phase};

/// Returns the node's operation if it is a cast.
pub(super) fn cast_of(node: &Node) -> Option<&CastOpIr> {
    match &node.operation {
        OperationIr::BaseFloat(BaseOperationIr::Cast(cast)) => Some(cast),
        _ => None,
    }
}

/// Moves casts that produce gradients to right after their operands. Autodiff puts them at the end of backward, so
/// every gradient would stay whole until then.
pub(super) fn widened_early(
    nodes: Vec<Node>,
    gradients: &BTreeMap<TensorId, Vec<usize>>,
) -> Vec<Node> {
    let mut waiting: BTreeMap<TensorId, Vec<Node>> = BTreeMap::new();
    let written: BTreeSet<TensorId> = nodes.iter().flat_map(Node::outputs).collect();
    let mut rest = Vec::with_capacity(nodes.len());
    for node in nodes {
        let cast = cast_of(&node).filter(|_| node.phase == Phase::Backward);
        let made = cast.filter(|cast| gradients.contains_key(&cast.out.id));
        match made.map(|cast| cast.input.id) {
            Some(input) if written.contains(&input) => {
                waiting.entry(input).or_default().push(node);
            }
            _ => rest.push(node),
        }
    }
    let mut scheduled = Vec::with_capacity(rest.len());
    for node in rest {
        let outputs: Vec<TensorId> = node.outputs().collect();
        scheduled.push(node);
        let casts = outputs.iter().filter_map(|output| waiting.remove(output));
        scheduled.extend(casts.flatten());
    }
    scheduled
}
