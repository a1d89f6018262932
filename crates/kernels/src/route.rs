//! Dispatch of fused operations to the backend of their tensors.

use std::cell::Cell;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::tensor::{Int, Tensor};
use burn_capture::CaptureBackend;

use crate::backend::Kernels;
use crate::documents::DocumentHeads;
use crate::halves::takes;

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
    Tensor::from_dispatch(Dispatch::fused_gelu(x.into_dispatch()))
}

/// Runs [`crate::layer_norm`](fn@crate::layer_norm) on the backend of its tensors, which must have the kernels.
pub(crate) fn layer_norm(
    x: Tensor<2>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f32,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_layer_norm(
        x.into_dispatch(),
        gamma.into_dispatch(),
        beta.into_dispatch(),
        epsilon,
    ))
}

/// Runs [`crate::causal_attention`] on the backend of its tensors, which must have the kernels.
pub(crate) fn causal_attention(qkv: Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_causal_attention(
        qkv.into_dispatch(),
        batch,
        heads,
    ))
}

/// Runs [`crate::document_attention`] on the backend of its tensors, which must have the kernels.
pub(crate) fn document_attention(
    qkv: Tensor<2>,
    positions: Tensor<2, Int>,
    form: DocumentHeads,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_document_attention(
        qkv.into_dispatch(),
        positions.into_dispatch(),
        form,
    ))
}

/// Runs [`crate::cross_entropy`](fn@crate::cross_entropy) on the backend of its tensors, which must have the kernels.
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fused_cross_entropy(
        logits.into_dispatch(),
        targets.into_dispatch(),
    ))
}

/// The operations that Burn routes to the backend of their tensors.
#[backend_extension(Flex, Capture, Autodiff)]
trait FusedOps: Backend {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self>;

    fn fused_causal_attention(
        qkv: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self>;

    fn fused_document_attention(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        form: DocumentHeads,
    ) -> FloatTensor<Self>;

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

macro_rules! untracked {
    ($backend:ty) => {
        impl FusedOps for $backend {
            fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
                Self::gelu_kernel(x)
            }

            fn fused_layer_norm(
                x: FloatTensor<Self>,
                gamma: FloatTensor<Self>,
                beta: FloatTensor<Self>,
                epsilon: f32,
            ) -> FloatTensor<Self> {
                Self::layer_norm_kernel(x, gamma, beta, epsilon)
            }

            fn fused_causal_attention(
                qkv: FloatTensor<Self>,
                batch: usize,
                heads: usize,
            ) -> FloatTensor<Self> {
                Self::causal_attention_kernel(qkv, batch, heads)
            }

            fn fused_document_attention(
                qkv: FloatTensor<Self>,
                positions: IntTensor<Self>,
                form: DocumentHeads,
            ) -> FloatTensor<Self> {
                Self::document_attention_kernel(qkv, positions, form)
            }

            fn fused_cross_entropy(
                logits: FloatTensor<Self>,
                targets: IntTensor<Self>,
            ) -> FloatTensor<Self> {
                let [_, loss] = Self::cross_entropy_kernel(logits, targets);
                loss
            }
        }
    };
}

untracked!(Flex);
untracked!(CaptureBackend);

impl<B: Kernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        crate::gelu::tracked::tracked::<B, C>(x)
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self> {
        crate::norm::tracked::tracked::<B, C>(x, gamma, beta, epsilon)
    }

    fn fused_causal_attention(
        qkv: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self> {
        crate::attention::tracked::tracked::<B, C>(qkv, batch, heads)
    }

    fn fused_document_attention(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        form: DocumentHeads,
    ) -> FloatTensor<Self> {
        crate::attention::tracked::tracked_documents::<B, C>(qkv, positions, form)
    }

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        crate::cross_entropy::tracked::tracked::<B, C>(logits, targets)
    }
}
