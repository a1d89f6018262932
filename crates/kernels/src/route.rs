//! Dispatch of fused operations to the backend of their tensors.

use std::cell::Cell;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_capture::CaptureBackend;
use burn_ir::ScalarIr;

use crate::backend::{Keeps, Kernels, ModelCall, TensorKind};
use crate::documents::DocumentHeads;
use crate::halves::takes;
use crate::table::FusedOperation;
use crate::tracked::{result_of, tracked};

thread_local! {
    static IS_RECORDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `record` and returns its result. During the call, this thread records each fused operation of this crate as a
/// single operation on Burn's capture device, in forward and backward.
///
/// The executor of the graph must run [`FusedOperation`](crate::FusedOperation)s, which compute on Burn's CPU
/// backend.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_kernels::{gelu, recorded};
///
/// let device = Device::capture();
/// let captured = device.capture_scope(|scope| {
///     let x = Tensor::<2>::zeros([2, 4], &device);
///     let _y = recorded(|| gelu(x));
///     scope.complete([], [])
/// });
/// let captured = captured.expect("nothing reads a value");
/// let names: Vec<_> = captured.graph.operations.iter().map(|op| format!("{op:?}")).collect();
/// assert!(names.iter().any(|name| name.contains("models.gelu")));
/// ```
pub fn recorded<T>(record: impl FnOnce() -> T) -> T {
    /// Restores the state even on a panic, because Burn panics when it cannot capture an operation.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_RECORDED.set(self.0);
        }
    }
    let _restore = Restore(IS_RECORDED.replace(true));
    record()
}

/// Returns true if kernels exist for the tensor's type and backend. Otherwise the functions of this crate compose
/// elementary operations.
pub fn supports<const D: usize>(tensor: &Tensor<D>) -> bool {
    let device = tensor.device().without_autodiff();
    let has_kernels = match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        DispatchDevice::Capture(_) => IS_RECORDED.get(),
        // If no other backend is compiled in, the arms above are exhaustive.
        #[allow(unreachable_patterns)]
        _ => false,
    };
    has_kernels && takes(tensor.dtype())
}

/// Runs [`crate::gelu`](fn@crate::gelu) on the backend of its tensor, which must have the kernels.
pub(crate) fn gelu(x: Tensor<2>) -> Tensor<2> {
    let call = ModelCall {
        kernel: FusedOperation::Gelu,
        gradient: FusedOperation::GeluBackward,
        scalars: Vec::new(),
        results: vec![kind(&x)],
        keeps: Keeps::Operands(1),
    };
    Tensor::from_dispatch(Dispatch::fused(x.into_dispatch(), call))
}

/// Runs [`crate::layer_norm`](fn@crate::layer_norm) on the backend of its tensors, which must have the kernels.
pub(crate) fn layer_norm(
    x: Tensor<2>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f32,
) -> Tensor<2> {
    let call = ModelCall {
        kernel: FusedOperation::LayerNorm,
        gradient: FusedOperation::LayerNormBackward,
        scalars: vec![ScalarIr::Float(epsilon.into())],
        results: vec![kind(&x)],
        keeps: Keeps::Operands(2),
    };
    let [gamma, beta] = [gamma, beta].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::fused_three(x.into_dispatch(), gamma, beta, call))
}

/// Runs [`crate::causal_attention`] on the backend of its tensors, which must have the kernels.
pub(crate) fn causal_attention(qkv: Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
    let call = causal(&qkv, &[batch, heads]);
    Tensor::from_dispatch(Dispatch::fused(qkv.into_dispatch(), call))
}

/// Runs [`crate::document_attention`] on the backend of its tensors, which must have the kernels.
pub(crate) fn document_attention(
    qkv: Tensor<2>,
    positions: Tensor<2, Int>,
    form: DocumentHeads,
) -> Tensor<2> {
    let [batch, _] = positions.dims();
    let call = causal(&qkv, &[batch, form.heads, form.reach.unwrap_or(0)]);
    let (qkv, positions) = (qkv.into_dispatch(), positions.into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_indexed(qkv, positions, call))
}

/// Returns the call of causal attention with these sizes.
fn causal(qkv: &Tensor<2>, sizes: &[usize]) -> ModelCall {
    let [rows, width] = qkv.dims();
    ModelCall {
        kernel: FusedOperation::CausalAttention,
        gradient: FusedOperation::CausalAttentionBackward,
        scalars: sizes
            .iter()
            .map(|size| ScalarIr::UInt(*size as u64))
            .collect(),
        results: vec![(Shape::new([rows, width / 3]), qkv.dtype())],
        keeps: Keeps::Operands(1),
    }
}

/// Runs [`crate::cross_entropy`](fn@crate::cross_entropy) on the backend of its tensors, which must have the kernels.
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let call = ModelCall {
        kernel: FusedOperation::CrossEntropy,
        gradient: FusedOperation::CrossEntropyBackward,
        scalars: Vec::new(),
        // The loss has 32 bits, regardless of the type of the logits.
        results: vec![kind(&logits), (Shape::new([1]), DType::F32)],
        keeps: Keeps::Result,
    };
    let (logits, targets) = (logits.into_dispatch(), targets.into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_indexed(logits, targets, call))
}

fn kind(tensor: &Tensor<2>) -> TensorKind {
    (tensor.shape(), tensor.dtype())
}

/// The calls that Burn routes to the backend of their tensors, by their numbers of operands.
#[backend_extension(Flex, Capture, Autodiff)]
trait FusedOps: Backend {
    fn fused(x: FloatTensor<Self>, call: ModelCall) -> FloatTensor<Self>;

    fn fused_three(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        call: ModelCall,
    ) -> FloatTensor<Self>;

    fn fused_indexed(
        x: FloatTensor<Self>,
        indices: IntTensor<Self>,
        call: ModelCall,
    ) -> FloatTensor<Self>;
}

macro_rules! untracked {
    ($backend:ty) => {
        impl FusedOps for $backend {
            fn fused(x: FloatTensor<Self>, call: ModelCall) -> FloatTensor<Self> {
                result_of::<Self>(vec![x], Vec::new(), call).0
            }

            fn fused_three(
                x: FloatTensor<Self>,
                y: FloatTensor<Self>,
                z: FloatTensor<Self>,
                call: ModelCall,
            ) -> FloatTensor<Self> {
                result_of::<Self>(vec![x, y, z], Vec::new(), call).0
            }

            fn fused_indexed(
                x: FloatTensor<Self>,
                indices: IntTensor<Self>,
                call: ModelCall,
            ) -> FloatTensor<Self> {
                result_of::<Self>(vec![x], vec![indices], call).0
            }
        }
    };
}

untracked!(Flex);
untracked!(CaptureBackend);

impl<B: Kernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn fused(x: FloatTensor<Self>, call: ModelCall) -> FloatTensor<Self> {
        tracked::<B, C, 1>([x], Vec::new(), call)
    }

    fn fused_three(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        call: ModelCall,
    ) -> FloatTensor<Self> {
        tracked::<B, C, 3>([x, y, z], Vec::new(), call)
    }

    fn fused_indexed(
        x: FloatTensor<Self>,
        indices: IntTensor<Self>,
        call: ModelCall,
    ) -> FloatTensor<Self> {
        tracked::<B, C, 1>([x], vec![indices], call)
    }
}
