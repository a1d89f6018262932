//! The comparison of two traces of one step.

use crate::graph::{Graph, Node, Phase};

/// Describes the first difference in forward or backward between two graphs of the same model. The optimizer's part is
/// not compared, because its scalars change from step to step and are patched.
pub(super) fn difference(first: &Graph, again: &Graph) -> Option<String> {
    let nodes = |graph: &Graph| -> Vec<Node> {
        let nodes = graph.nodes().iter();
        nodes
            .filter(|node| node.phase != Phase::Optimizer)
            .cloned()
            .collect()
    };
    let (a, b) = (nodes(first), nodes(again));
    // Constants are compared first, because different data does not change an operation.
    let constants = first.constants().iter().zip(again.constants());
    for ((_, a), (_, b)) in constants {
        if a.shape() == b.shape() && a != b {
            return Some(format!(
                "a tensor of host data, {:?} {:?}, had different values",
                a.dtype(),
                a.shape().to_vec()
            ));
        }
    }
    for (index, (a, b)) in a.iter().zip(&b).enumerate() {
        if a.operation == b.operation || are_alike(a, b) {
            continue;
        }
        let (old, new) = (words(a), words(b));
        return Some(if old == new {
            format!(
                "operation {index} was {old} with {:?}, then with {:?}",
                a.scalar_values(),
                b.scalar_values()
            )
        } else {
            format!("operation {index} was {old}, then {new}")
        });
    }
    if a.len() != b.len() {
        let extra = a.get(b.len()).or(b.get(a.len())).map(words);
        return Some(format!(
            "it had {} operations, then {}; only one has {}",
            a.len(),
            b.len(),
            extra.unwrap_or_default()
        ));
    }
    None
}

/// Returns true if two operations print the same text. Operations with a NaN scalar are never equal by `==`.
fn are_alike(a: &Node, b: &Node) -> bool {
    format!("{:?}", a.operation) == format!("{:?}", b.operation)
}

/// Describes an operation by its name and the shape of its result.
fn words(node: &Node) -> String {
    let shape = node
        .operation
        .outputs()
        .next()
        .map(|out| out.shape.to_vec());
    format!("{} of shape {:?}", node.name(), shape.unwrap_or_default())
}
