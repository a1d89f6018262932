//! The layer norms of the models.

use burn::nn::{LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};

/// The number added to the variance, which prevents a division by zero for constant rows.
pub(crate) const EPSILON: f64 = 1e-5;

/// Returns a layer norm with scales of one and offsets of zero.
pub(crate) fn init(dim: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(dim).with_epsilon(EPSILON).init(device)
}

/// Normalizes rows to mean zero and variance one, then applies the scale and shift parameters.
pub(crate) fn layer_norm(norm: &LayerNorm, x: Tensor<2>) -> Tensor<2> {
    burn_fsdp_kernels::layer_norm(norm, EPSILON, x)
}
