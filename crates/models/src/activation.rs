use burn::tensor::{Tensor, activation};

use crate::fused;

/// Exact GELU: `x` times the probability that a normal variable is smaller.
pub(crate) fn gelu(x: Tensor<2>) -> Tensor<2> {
    if fused::supports(&x) {
        fused::gelu(x)
    } else {
        activation::gelu(x)
    }
}
