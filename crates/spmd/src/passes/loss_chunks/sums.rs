//! Sums over several dims in one node.

use std::collections::BTreeMap;

use burn_ir::{NumericOperationIr, OperationIr, ReduceDimsOpIr, TensorId, TensorIr};

use crate::graph::{Graph, Node};

/// Joins sums over one dim after another, as autodiff makes for a broadcast bias. A part cannot compute the first of them
/// alone: sequences and their tokens count the rows together. The nodes that are no longer read remain.
pub(super) fn joined(mut graph: Graph) -> Graph {
    let mut readers: BTreeMap<TensorId, usize> = BTreeMap::new();
    for id in graph
        .nodes()
        .iter()
        .flat_map(Node::inputs)
        .chain(graph.kept())
    {
        *readers.entry(id).or_default() += 1;
    }
    let mut sums: BTreeMap<TensorId, (TensorIr, Vec<usize>)> = BTreeMap::new();
    let mut nodes = graph.take_nodes();
    for node in &mut nodes {
        let OperationIr::NumericFloat(dtype, NumericOperationIr::SumDim(op)) = &node.operation
        else {
            continue;
        };
        let (mut input, mut axes) = (op.input.clone(), vec![op.axis]);
        if let Some((first, others)) = sums.get(&input.id)
            && readers.get(&input.id) == Some(&1)
            && !others.contains(&op.axis)
        {
            input = first.clone();
            axes.splice(0..0, others.iter().copied());
        }
        let out = op.out.clone();
        sums.insert(out.id, (input.clone(), axes.clone()));
        if axes.len() > 1 {
            let sum = NumericOperationIr::SumDims(ReduceDimsOpIr { input, out, axes });
            node.operation = OperationIr::NumericFloat(*dtype, sum);
        }
    }
    graph.set_nodes(nodes);
    graph
}
