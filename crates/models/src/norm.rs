//! Layer norms as the models have them.

use burn::nn::{LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};

/// The number added to the variance, so that constant rows do not divide by zero.
pub(crate) const EPSILON: f64 = 1e-5;

/// Returns a layer norm with scales of one and offsets of zero.
pub(crate) fn init(dim: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(dim).with_epsilon(EPSILON).init(device)
}

/// Returns rows with mean zero and variance one, scaled and shifted by the parameters.
pub(crate) fn layer_norm(norm: &LayerNorm, x: Tensor<2>) -> Tensor<2> {
    burn_fsdp_kernels::layer_norm(norm, EPSILON, x)
}
