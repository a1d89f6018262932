//! Node rewriting shared by several passes.

use std::collections::BTreeMap;

use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Node, Role, rename};

/// Copies a node with inputs renamed by `map` and new outputs, which it adds to `map`.
pub(super) fn repeat(
    graph: &mut Graph,
    node: &Node,
    map: &mut BTreeMap<TensorId, TensorId>,
) -> Result<Node, Error> {
    for output in node.outputs() {
        let tensor = graph.read(output)?;
        let fresh = graph.add_value(tensor.shape.to_vec(), tensor.dtype, Role::Temporary);
        if let Some(placements) = graph.placements(output) {
            let placements = placements.to_vec();
            graph.place(fresh, placements);
        }
        map.insert(output, fresh);
    }
    let mut copy = node.clone();
    rename(&mut copy.operation, map);
    Ok(copy)
}
