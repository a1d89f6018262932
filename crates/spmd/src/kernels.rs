//! The kernels of the crate `kernels` as graph operations.

use std::any::Any;

use burn_fsdp_kernels::{FusedCost, FusedOperation, takes};
use burn_fsdp_tensors::is_host_backend;
use burn_ir::{
    BackendIr, BaseOperationIr, CastOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr,
    NumericOperationIr, OperationIr, ReduceDimOpIr, ScalarIr, TensorIr,
};

use crate::custom::CustomOperations;
use crate::graph::{CustomProfile, Flops, Node, Phase};

/// Returns all operations of the crate `kernels`. Every step on Burn's CPU backend supports them. The graph of a loss
/// recorded with `burn_fsdp_kernels::recorded` contains them, and [`UseKernels`](crate::passes::UseKernels) inserts
/// them in place of operations that Burn composes.
pub fn kernels() -> CustomOperations {
    let add = |known: CustomOperations, operation: FusedOperation| {
        known.kernel(
            operation.name(),
            move |call, tensors| operation.run(call, tensors),
            move |call| profile(operation, call),
        )
    };
    let all = FusedOperation::ALL.into_iter();
    all.fold(CustomOperations::new(), add)
}

/// Returns the kernels for a backend that has them, and otherwise an empty set.
pub(crate) fn kernels_of<B: BackendIr>() -> CustomOperations<B> {
    let all = kernels();
    let own = (&all as &dyn Any).downcast_ref::<CustomOperations<B>>();
    own.cloned().unwrap_or_default()
}

/// Returns true if a backend has the kernels.
pub(crate) fn has_kernels<B: BackendIr>() -> bool {
    is_host_backend::<B>()
}

/// Returns true if all tensors have the same type and the kernels support it.
pub(crate) fn are_alike<'a>(tensors: impl IntoIterator<Item = &'a TensorIr>) -> bool {
    let mut types = tensors.into_iter().map(|tensor| tensor.dtype);
    types
        .next()
        .is_none_or(|first| takes(first) && types.all(|other| other == first))
}

/// Creates the node of a kernel with these inputs and outputs.
pub(crate) fn fused_node(
    operation: FusedOperation,
    (inputs, outputs): (Vec<TensorIr>, Vec<TensorIr>),
    scalars: Vec<ScalarIr>,
    phase: Phase,
) -> Node {
    let call = CustomOpIr {
        id: operation.name().to_owned(),
        inputs,
        outputs,
        scalars,
    };
    let custom = profile(operation, &call);
    let mut node = Node::new(OperationIr::Custom(call), phase);
    node.custom = Some(custom);
    node
}

/// Returns the Burn operation that a kernel replaces, if it is a single one: a matrix product, a sum along a dim, or a
/// cast.
fn plain(operation: &OperationIr) -> Option<OperationIr> {
    let OperationIr::Custom(call) = operation else {
        return None;
    };
    let kernel = FusedOperation::named(&call.id)?;
    let (inputs, out) = (call.inputs.as_slice(), call.outputs.first()?);
    Some(match (kernel, inputs) {
        (FusedOperation::Matmul, [lhs, rhs]) => {
            let product = MatmulOpIr {
                lhs: lhs.clone(),
                rhs: rhs.clone(),
                out: out.clone(),
            };
            OperationIr::Float(out.dtype, FloatOperationIr::Matmul(product))
        }
        (FusedOperation::SumDim, [input]) => {
            let sums = ReduceDimOpIr {
                input: input.clone(),
                out: out.clone(),
                axis: call.scalars.first()?.elem::<u64>() as usize,
                accumulator_len: 1,
            };
            OperationIr::NumericFloat(out.dtype, NumericOperationIr::SumDim(sums))
        }
        (FusedOperation::Cast, [input]) => {
            let cast = CastOpIr {
                input: input.clone(),
                out: out.clone(),
            };
            OperationIr::BaseFloat(BaseOperationIr::Cast(cast))
        }
        _ => return None,
    })
}

/// Returns the node with the [plain] operation in place of its kernel; `None` if it has no such operation.
pub(crate) fn plain_node(node: &Node) -> Option<Node> {
    let mut plain = Node {
        operation: plain(&node.operation)?,
        ..node.clone()
    };
    plain.custom = None;
    Some(plain)
}

/// Returns the properties of a call that passes and plans need.
fn profile(operation: FusedOperation, call: &CustomOpIr) -> CustomProfile {
    let FusedCost { matmul, pointwise } = operation.cost(call);
    CustomProfile {
        is_pure: true,
        is_cheap: operation.is_cheap(),
        written_over: operation.written_over(call),
        flops: Flops {
            matmul,
            convolution: 0,
            pointwise,
        },
    }
}
