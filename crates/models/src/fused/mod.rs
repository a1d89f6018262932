//! Operations with a gradient written by hand, for 32-bit floats on Burn's CPU
//! backend.
//!
//! Composed of Burn's elementary operations, attention or a layer norm makes a
//! dozen passes over memory and saves as many tensors for the backward pass. Here
//! each of them is one node of the graph that saves its input alone, computes
//! whole rows while they are in the cache, and uses vector instructions for `exp`
//! and `erf`. They count as expensive, so that a gradient checkpointing device keeps
//! their outputs: nothing but gathered weights is left to recompute.
//!
//! The mathematics is that of the composed operations, which every other backend
//! and type uses, and which the tests compare with.
//!
//! On Burn's capture device, which records graphs for others to run, they are recorded as
//! [`FusedOperation`]s inside of [`recorded`], and composed outside: whoever runs the graph must
//! know them.

mod attention;
mod cross_entropy;
mod exp;
mod gelu;
mod kernels;
mod layer_norm;
mod operation;
mod rows;
#[cfg(test)]
mod tests;

use std::cell::Cell;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::tensor::{DType, Int, Tensor};
use burn_capture::CaptureBackend;
use burn_flex::FlexTensor;

use kernels::Kernels;

pub use operation::{FusedCost, FusedOperation};

thread_local! {
    static IS_RECORDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `record`, and lets the models record each fused operation as one operation of its own when
/// they run on Burn's capture device, forward and backward.
///
/// Whoever runs the graph must run [`FusedOperation`]s, which compute on Burn's CPU backend.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_fsdp_models::{GptConfig, fused};
///
/// let config = GptConfig { layers: 1, dim: 8, heads: 2, vocab: 16, seq: 4 };
/// let device = Device::capture();
/// let captured = device.capture_scope(|scope| {
///     let model = config.init(&device, 1).expect("the sizes are valid");
///     let tokens = Tensor::<2, Int>::zeros([2, 4], &device);
///     let _logits = fused::recorded(|| model.forward(tokens));
///     scope.complete([], [])
/// });
/// let captured = captured.expect("nothing reads a value");
/// let names: Vec<_> = captured.graph.operations.iter().map(|op| format!("{op:?}")).collect();
/// assert!(names.iter().any(|name| name.contains("models.gelu")));
/// ```
pub fn recorded<T>(record: impl FnOnce() -> T) -> T {
    /// Undone by a panic, too: that is how Burn refuses to capture something.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_RECORDED.set(self.0);
        }
    }
    let _restore = Restore(IS_RECORDED.replace(true));
    record()
}

/// Whether the operations of this module can be used with a tensor.
pub(crate) fn supports<const D: usize>(tensor: &Tensor<D>) -> bool {
    let device = tensor.device().without_autodiff();
    let has_kernels = match device.as_dispatch() {
        DispatchDevice::Flex(_) => true,
        DispatchDevice::Capture(_) => IS_RECORDED.get(),
        // Without any other backend compiled in, the arms above are all there are.
        #[allow(unreachable_patterns)]
        _ => false,
    };
    has_kernels && tensor.dtype() == DType::F32
}

/// See [`crate::activation::gelu`].
pub(crate) fn gelu(x: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_gelu(x.into_dispatch()))
}

/// See [`crate::norm::layer_norm`].
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

/// See [`crate::attention::causal_attention`].
pub(crate) fn causal_attention(qkv: Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_causal_attention(
        qkv.into_dispatch(),
        batch,
        heads,
    ))
}

/// See [`crate::loss::cross_entropy`].
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fused_cross_entropy(
        logits.into_dispatch(),
        targets.into_dispatch(),
    ))
}

/// The operations, for Burn to route to the backend of their tensors.
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

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl Kernels for Flex {
    fn gelu_kernel(x: FlexTensor) -> FlexTensor {
        gelu::forward(x)
    }

    fn gelu_gradient(x: FlexTensor, grad: FlexTensor) -> FlexTensor {
        gelu::backward(x, grad)
    }

    fn layer_norm_kernel(
        x: FlexTensor,
        gamma: FlexTensor,
        beta: FlexTensor,
        epsilon: f32,
    ) -> FlexTensor {
        layer_norm::forward(x, gamma, beta, epsilon)
    }

    fn layer_norm_gradients(
        x: FlexTensor,
        gamma: FlexTensor,
        grad: FlexTensor,
        epsilon: f32,
    ) -> [FlexTensor; 3] {
        layer_norm::backward(x, gamma, grad, epsilon)
    }

    fn causal_attention_kernel(qkv: FlexTensor, batch: usize, heads: usize) -> FlexTensor {
        attention::forward(qkv, batch, heads)
    }

    fn causal_attention_gradient(
        qkv: FlexTensor,
        grad: FlexTensor,
        batch: usize,
        heads: usize,
    ) -> FlexTensor {
        attention::backward(qkv, grad, batch, heads)
    }

    fn cross_entropy_kernel(logits: FlexTensor, targets: FlexTensor) -> [FlexTensor; 2] {
        cross_entropy::forward(logits, &targets)
    }

    fn cross_entropy_gradient(logits_gradient: FlexTensor, grad: FlexTensor) -> FlexTensor {
        cross_entropy::backward(logits_gradient, grad)
    }
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
        gelu::tracked::<B, C>(x)
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self> {
        layer_norm::tracked::<B, C>(x, gamma, beta, epsilon)
    }

    fn fused_causal_attention(
        qkv: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self> {
        attention::tracked::<B, C>(qkv, batch, heads)
    }

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        cross_entropy::tracked::<B, C>(logits, targets)
    }
}
