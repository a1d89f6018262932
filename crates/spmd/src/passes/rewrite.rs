//! Rewriting of nodes that several passes share.

use std::collections::BTreeMap;

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Node, Role, Update, rename};

/// Copies a node so that it writes new temporary values; `map` leads from the old ids to the new ones afterwards.
pub(super) fn repeat(
    graph: &mut Graph,
    node: &Node,
    map: &mut BTreeMap<TensorId, TensorId>,
) -> Result<Node, Error> {
    for output in node.outputs() {
        let tensor = graph.read(output)?;
        let fresh = graph.add_value(tensor.shape.to_vec(), tensor.dtype, Role::Temporary);
        map.insert(output, fresh);
    }
    let mut copy = node.clone();
    rename(&mut copy.operation, map);
    Ok(copy)
}

/// Returns true if an update is the optimizer's: those of buffers are forward's.
pub(super) fn of_optimizer(graph: &Graph, update: &Update) -> bool {
    let role = graph.value(update.into).map(|value| &value.role);
    matches!(role, Some(Role::Parameter(_) | Role::State { .. }))
}
