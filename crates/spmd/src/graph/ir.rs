//! Conversion to Burn's graphs.

use burn_ir::OperationIr;

use super::Graph;

/// Converts the operations to a Burn graph.
impl From<&Graph> for burn_ir::GraphIr {
    fn from(graph: &Graph) -> Self {
        let operations: Vec<OperationIr> = graph
            .nodes
            .iter()
            .map(|node| node.operation.clone())
            .collect();
        Self::new(operations)
    }
}
