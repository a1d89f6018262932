//! The pass that selects kernels for single operations of Burn.

use burn::tensor::DType;
use burn_fsdp_kernels::{FusedOperation, takes};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr,
};

use super::kernels::put;
use super::pointwise::LARGE;
use crate::error::Error;
use crate::graph::{Graph, Node, Sizes};
use crate::pass_id::PassId;
use crate::transform::GraphTransform;

/// The pass that selects kernels for matrix products, for casts to `bf16` and back, and for sums along any dim except
/// the last, of `bf16` or of many elements. Each computes the same function as the operation that it replaces.
///
/// ```text
/// before                                 after
/// %4 = Float.Matmul(%1, %9)              %4 = models.matmul(%1, %9)
/// ```
///
/// Burn's CPU backend fills the memory of a product with zeros before it writes there, copies the product to aligned
/// memory, and processes `bf16` element by element. Results are bit-identical, except for `bf16` products. Both sum in
/// 32 bits, but the kernel does not convert the factors first, so it adds in a different order.
///
/// The pass runs after collectives are placed, because the passes that place them only handle Burn's operations. Typing
/// treats such a kernel as the operation that it replaces.
#[derive(Debug, Clone, Copy, Default)]
pub struct SelectKernels;

impl GraphTransform for SelectKernels {
    fn id(&self) -> PassId {
        PassId::SelectKernels
    }

    fn after(&self) -> &'static [PassId] {
        &[PassId::InsertCollectives]
    }

    fn before(&self) -> &'static [PassId] {
        &[PassId::Liveness]
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        for node in &mut nodes {
            if let Some((kernel, inputs, output, scalars)) = kernel_for(node, graph.sizes()) {
                put(node, kernel, inputs, output, scalars);
            }
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

/// A kernel, with operands, result and scalars.
type Call = (FusedOperation, Vec<TensorIr>, TensorIr, Vec<ScalarIr>);

/// Returns the call of the kernel that replaces a node; `None` if the node stays.
fn kernel_for(node: &Node, sizes: &Sizes) -> Option<Call> {
    if node.collective.is_some() || node.shift.is_some() || !node.scalars.is_empty() {
        return None;
    }
    match &node.operation {
        OperationIr::Float(dtype, FloatOperationIr::Matmul(op)) if takes(*dtype) => {
            let inputs = vec![op.lhs.clone(), op.rhs.clone()];
            Some((FusedOperation::Matmul, inputs, op.out.clone(), Vec::new()))
        }
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => {
            let types = [op.input.dtype, op.out.dtype];
            let is_known = types.contains(&DType::F32) && types.contains(&DType::BF16);
            let inputs = vec![op.input.clone()];
            is_known.then(|| (FusedOperation::Cast, inputs, op.out.clone(), Vec::new()))
        }
        OperationIr::NumericFloat(dtype, NumericOperationIr::SumDim(op)) if takes(*dtype) => {
            // Sums along the last dim are taken in an order that the vectorized kernel does not use.
            let is_inner = op.axis + 1 < op.input.shape.rank();
            // Burn processes 16-bit floats one by one, and all elements on one thread.
            let own = op.input.shape.num_elements();
            let is_large = sizes.elements(op.input.id, own) >= LARGE;
            let is_known = is_inner && (*dtype == DType::BF16 || is_large);
            let dim = vec![ScalarIr::UInt(op.axis as u64)];
            let inputs = vec![op.input.clone()];
            is_known.then(|| (FusedOperation::SumDim, inputs, op.out.clone(), dim))
        }
        _ => None,
    }
}
