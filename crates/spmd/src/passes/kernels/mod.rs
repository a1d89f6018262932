//! The pass that puts kernels in place of what Burn composes of many operations.
//!
//! It takes the graph of one rank, forward and backward, and leaves nodes that read less memory.

mod attention;
mod layer_norm;
mod pattern;
mod product;
mod softmax;
mod walk;

use burn::tensor::DType;
use burn_fsdp_kernels::FusedOperation;
use burn_ir::{
    ActivationOperationIr, BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr,
    ScalarIr, TensorIr,
};

use super::dead_code::DeadCode;
use crate::error::Error;
use crate::graph::{Graph, Node};
use crate::kernels::fused_node;
use crate::pass_id::PassId;
use crate::transform::GraphTransform;
use pattern::Patterns;

/// The pass that recognises attention, softmax, its logarithm, layer norms and GELU in any graph, forward and backward,
/// and replaces each by one operation of the crate `kernels`; and products that Burn makes one for each row of a batch, which
/// become one product each. All products become kernels, which write their results once, and
/// multiply halves (`bf16`) as they are; and so do sums of halves, and casts to halves and back.
///
/// ```text
/// before                                      after
/// %111 = NumericFloat.MaxDim(%110)            %115 = models.softmax(%110)
/// %112 = NumericFloat.Sub(%110, %111)
/// %113 = Float.Exp(%112)
/// %114 = NumericFloat.SumDim(%113)
/// %115 = NumericFloat.Div(%113, %114)
/// ```
///
/// A function is replaced with its gradient or not at all: the operations of both must be those that Burn composes,
/// and no other may read what is between them. Values are those of the operations that are replaced, to about 1e-7 of the largest
/// of a row: sums are taken in another order, and `exp` and `erf` are of the kernels' own. Of a layer norm the rows must
/// lie along two dims at least, as in `[batch, time, width]`; others stay as they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct UseKernels;

impl GraphTransform for UseKernels {
    fn id(&self) -> PassId {
        PassId::UseKernels
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::CommonSubexpressions]
    }

    fn before(&self) -> &'static [PassId] {
        &[
            PassId::RecomputeUnits,
            PassId::Recompute,
            PassId::InsertCollectives,
            PassId::Liveness,
        ]
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let mut graph = graph;
        let kinds = [
            softmax::replace,
            // Of those, some are attention.
            attention::replace,
            layer_norm::replace,
            product::replace,
        ];
        for replace in kinds {
            let mut patterns = Patterns::new(graph);
            replace(&mut patterns)?;
            // What was replaced is read by nothing.
            graph = DeadCode.transform(patterns.finish())?;
        }
        let mut nodes = graph.take_nodes();
        for node in &mut nodes {
            use_gelu(node);
            use_products(node);
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

/// Replaces Burn's GELU, and its gradient, by a kernel.
fn use_gelu(node: &mut Node) {
    let (operation, inputs, out) = match &node.operation {
        OperationIr::Activation(ActivationOperationIr::Gelu(op)) => {
            (FusedOperation::Gelu, vec![op.input.clone()], &op.out)
        }
        OperationIr::Activation(ActivationOperationIr::GeluBackward(op)) => {
            let inputs = vec![op.lhs.clone(), op.rhs.clone()];
            (FusedOperation::GeluBackward, inputs, &op.out)
        }
        _ => return,
    };
    let out = out.clone();
    if pattern::is_known(inputs.iter().chain([&out])) {
        put(node, operation, inputs, out, Vec::new());
    }
}

/// Replaces products, sums of halves, and casts to halves and back.
fn use_products(node: &mut Node) {
    let (operation, inputs, out) = match &node.operation {
        OperationIr::Float(DType::F32 | DType::BF16, FloatOperationIr::Matmul(op)) => {
            let inputs = vec![op.lhs.clone(), op.rhs.clone()];
            (FusedOperation::Matmul, inputs, &op.out)
        }
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => {
            let types = [op.input.dtype, op.out.dtype];
            if !types.contains(&DType::F32) || !types.contains(&DType::BF16) {
                return;
            }
            (FusedOperation::Cast, vec![op.input.clone()], &op.out)
        }
        OperationIr::NumericFloat(DType::BF16, NumericOperationIr::SumDim(op)) => {
            // Sums along the last dim are taken in an order that vectors do not have.
            if op.axis + 1 >= op.input.shape.rank() {
                return;
            }
            let (input, out) = (op.input.clone(), op.out.clone());
            let dim = ScalarIr::UInt(op.axis as u64);
            return put(node, FusedOperation::SumDim, vec![input], out, vec![dim]);
        }
        _ => return,
    };
    let out = out.clone();
    put(node, operation, inputs, out, Vec::new());
}

/// Puts a kernel in the place of a node.
fn put(
    node: &mut Node,
    operation: FusedOperation,
    inputs: Vec<TensorIr>,
    out: TensorIr,
    scalars: Vec<ScalarIr>,
) {
    let (phase, path) = (node.phase, node.path.take());
    *node = fused_node(operation, (inputs, vec![out]), scalars, phase);
    node.path = path;
}
