//! The numbers of the draws of a step.

use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr};

use crate::graph::{Draw, Graph, Node, Phase};

/// Says of a traced step which random numbers of a seed each node draws. Those of the optimizer stay the backend's.
pub(super) fn numbered(mut graph: Graph, seed: u64, is_own: bool) -> Graph {
    let mut nodes = graph.take_nodes();
    let drawing = nodes.iter_mut().filter(|node| draws(node));
    for (number, node) in (0..).zip(drawing) {
        let out = node.operation.outputs().next();
        let whole = out.map_or_else(Vec::new, |out| out.shape.to_vec());
        node.draw = Some(Draw {
            seed,
            number,
            whole,
            shifts: Vec::new(),
            is_own,
        });
    }
    graph.set_nodes(nodes);
    graph
}

/// Returns true for a node that draws random numbers for the loss or its gradients.
fn draws(node: &Node) -> bool {
    let is_random = matches!(
        node.operation,
        OperationIr::Float(_, FloatOperationIr::Random(_))
            | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(_))
            | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
    );
    is_random && node.phase != Phase::Optimizer
}
