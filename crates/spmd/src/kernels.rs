//! The kernels of the crate `kernels` as graph operations.

use std::any::Any;

use burn_fsdp_kernels::{FusedCost, FusedOperation, KernelPlacement};
use burn_fsdp_tensors::is_host_backend;
use burn_ir::{BackendIr, CustomOpIr, OperationIr, ScalarIr, TensorIr};

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

/// Returns the node with the single operation of Burn in place of the kernel that stands for it; `None` if it has no
/// such operation.
pub(crate) fn plain_node(node: &Node) -> Option<Node> {
    let OperationIr::Custom(call) = &node.operation else {
        return None;
    };
    let kernel = FusedOperation::named(&call.id)?.record();
    let mut plain = Node {
        operation: (kernel.plain)(call)?,
        ..node.clone()
    };
    plain.custom = None;
    Some(plain)
}

/// Returns true for a kernel whose results have the types that the steps of its program give them.
pub(crate) fn is_program(call: &CustomOpIr) -> bool {
    let kernel = FusedOperation::named(&call.id);
    kernel.is_some_and(|kernel| matches!(kernel.record().placement, KernelPlacement::Program))
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
