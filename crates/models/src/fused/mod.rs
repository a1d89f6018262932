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

mod attention;
mod cross_entropy;
mod exp;
mod gelu;
mod layer_norm;
mod rows;
#[cfg(test)]
mod tests;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::FlexTensor;

/// Whether the operations of this module can be used with a tensor.
pub(crate) fn supports<const D: usize>(tensor: &Tensor<D>) -> bool {
    let device = tensor.device().without_autodiff();
    tensor.dtype() == DType::F32 && matches!(device.as_dispatch(), DispatchDevice::Flex(_))
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
#[backend_extension(Flex, Autodiff)]
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

impl FusedOps for Flex {
    fn fused_gelu(x: FlexTensor) -> FlexTensor {
        gelu::forward(x)
    }

    fn fused_layer_norm(
        x: FlexTensor,
        gamma: FlexTensor,
        beta: FlexTensor,
        epsilon: f32,
    ) -> FlexTensor {
        layer_norm::forward(&x, &gamma, &beta, epsilon)
    }

    fn fused_causal_attention(qkv: FlexTensor, batch: usize, heads: usize) -> FlexTensor {
        attention::forward(qkv, batch, heads)
    }

    fn fused_cross_entropy(logits: FlexTensor, targets: FlexTensor) -> FlexTensor {
        cross_entropy::forward(logits, &targets).loss
    }
}

impl<C: CheckpointStrategy> FusedOps for Autodiff<Flex, C> {
    fn fused_gelu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        gelu::tracked::<C>(x)
    }

    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self> {
        layer_norm::tracked::<C>(x, gamma, beta, epsilon)
    }

    fn fused_causal_attention(
        qkv: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self> {
        attention::tracked::<C>(qkv, batch, heads)
    }

    fn fused_cross_entropy(logits: FloatTensor<Self>, targets: FlexTensor) -> FloatTensor<Self> {
        cross_entropy::tracked::<C>(logits, &targets)
    }
}
