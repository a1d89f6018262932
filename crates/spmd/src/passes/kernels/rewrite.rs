//! The patterns of kernels on a graph: what they search, and the changes that they make.

use std::collections::BTreeMap;

use burn_fsdp_kernels::{
    FusedOperation, Inserted, Kind, PatternChange, PatternNode, PatternPhase, Patterns, kind_of,
};
use burn_fsdp_mesh::Placement;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ShapeOpIr, SwapDimsOpIr, TensorId,
};

use crate::error::Error;
use crate::graph::{Graph, Node, Phase, Role, Trait, is};
use crate::kernels::fused_node;

/// Applies the changes of a search for patterns. The graph still contains values that are no longer read.
pub(super) fn rewritten(
    mut graph: Graph,
    replace: impl FnOnce(&mut Patterns),
) -> Result<Graph, Error> {
    let mut patterns = patterns_of(&graph);
    replace(&mut patterns);
    let (changes, gone) = patterns.finish();
    let nodes = graph.take_nodes();
    let mut declared = BTreeMap::new();
    let mut before: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    for change in changes {
        match change {
            PatternChange::Declare { id, shape, dtype } => {
                declared.insert(id, graph.add_value(shape, dtype, Role::Temporary));
            }
            PatternChange::Insert {
                at,
                operation,
                inputs,
                outputs,
            } => {
                let own = |id: &TensorId| declared.get(id).copied().unwrap_or(*id);
                let ends = [inputs, outputs].map(|ids| ids.iter().map(own).collect::<Vec<_>>());
                let node = inserted(&mut graph, operation, ends, nodes[at].phase)?;
                before.entry(at).or_default().push(node);
            }
        }
    }
    let mut scheduled = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.into_iter().enumerate() {
        scheduled.extend(before.remove(&index).unwrap_or_default());
        if !gone.contains(&index) {
            scheduled.push(node);
        }
    }
    graph.set_nodes(scheduled);
    graph.sync_nodes();
    Ok(graph)
}

/// Starts a search for patterns.
fn patterns_of(graph: &Graph) -> Patterns {
    let gradients = graph.parameters().iter().filter_map(|p| p.gradient);
    let kept = graph.kept().into_iter().chain(gradients).collect();
    let values = graph.values();
    let values = values.map(|value| (value.id, (value.shape.clone(), value.dtype)));
    let nodes = graph.nodes().iter().map(pattern_node);
    Patterns::new(nodes.collect(), values.collect(), kept)
}

fn pattern_node(node: &Node) -> PatternNode {
    let kind = match &node.operation {
        _ if !node.scalars.is_empty() => None,
        OperationIr::Custom(call) => {
            FusedOperation::named(&call.id).map(|kernel| Kind::Kernel(kernel.name()))
        }
        operation => kind_of(operation),
    };
    let is_reshape = matches!(
        node.operation,
        OperationIr::BaseFloat(BaseOperationIr::Reshape(_))
    );
    PatternNode {
        kind,
        inputs: node.inputs().collect(),
        outputs: node.outputs().collect(),
        phase: match node.phase {
            Phase::Forward => PatternPhase::Forward,
            Phase::Backward => PatternPhase::Backward,
            Phase::Optimizer => PatternPhase::Optimizer,
        },
        is_view: is(&node.operation, Trait::View) && !is_reshape,
    }
}

/// Creates an inserted node. A view is placed like its base, and a base like its view.
fn inserted(
    graph: &mut Graph,
    operation: Inserted,
    [inputs, outputs]: [Vec<TensorId>; 2],
    phase: Phase,
) -> Result<Node, Error> {
    let operands = inputs.iter().map(|id| graph.read(*id));
    let operands = operands.collect::<Result<Vec<_>, _>>()?;
    let results = outputs.iter().map(|id| graph.write(*id));
    let results = results.collect::<Result<Vec<_>, _>>()?;
    let operation = match (operation, operands.as_slice(), results.as_slice()) {
        (Inserted::Kernel(name, scalars), ..) => {
            let kernel = FusedOperation::named(name);
            let kernel = kernel.ok_or_else(|| Error::UnknownOperation { name: name.into() })?;
            return Ok(fused_node(kernel, (operands, results), scalars, phase));
        }
        (Inserted::Add, [lhs, rhs], [out]) => {
            let (lhs, rhs, out) = (lhs.clone(), rhs.clone(), out.clone());
            let add = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
            OperationIr::NumericFloat(operands[0].dtype, add)
        }
        (Inserted::Matmul, [lhs, rhs], [out]) => {
            let (lhs, rhs, out) = (lhs.clone(), rhs.clone(), out.clone());
            let product = FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out });
            OperationIr::Float(operands[0].dtype, product)
        }
        (Inserted::Swap(dim1, dim2), [input], [out]) => {
            let swapped = |dim| match dim {
                _ if dim == dim1 => dim2,
                _ if dim == dim2 => dim1,
                other => other,
            };
            place_as(graph, input.id, out.id, swapped);
            place_as(graph, out.id, input.id, swapped);
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(SwapDimsOpIr {
                input: input.clone(),
                out: out.clone(),
                dim1,
                dim2,
            }))
        }
        (Inserted::Reshape, [input], [out]) => {
            place_as(graph, input.id, out.id, |dim| dim);
            OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr {
                input: input.clone(),
                out: out.clone(),
            }))
        }
        (operation, ..) => {
            return Err(Error::Internal(format!(
                "{operation:?} has {} operands and {} results",
                inputs.len(),
                outputs.len()
            )));
        }
    };
    Ok(Node::new(operation, phase))
}

/// Places a value like its view or base `view`, unless it is given or already placed.
fn place_as(graph: &mut Graph, value: TensorId, view: TensorId, dim_of: impl Fn(usize) -> usize) {
    let is_given = |value: TensorId| graph.value(value).is_some_and(|of| of.role.is_given());
    if graph.placements(value).is_some() || is_given(value) {
        return;
    }
    let Some(on) = graph.placements(view) else {
        return;
    };
    let on = on.iter().map(|placement| match placement {
        Placement::Shard(dim) => Placement::Shard(dim_of(*dim)),
        other => *other,
    });
    let on = on.collect();
    graph.place(value, on);
}
