//! The operations for use in models, on any backend.

use burn::nn::LayerNorm;
use burn::tensor::{DType, Int, Tensor, activation};

use crate::composed;
use crate::documents::DocumentHeads;
use crate::route::{self, supports};

/// Computes the exact GELU: `x` times the probability that a standard normal variable is below `x`.
pub fn gelu(x: Tensor<2>) -> Tensor<2> {
    if supports(&x) {
        route::gelu(x)
    } else {
        activation::gelu(x)
    }
}

/// Normalizes rows to mean zero and variance one, then scales and shifts them by the parameters of `norm`. `epsilon`
/// must be the norm's own, which Burn does not expose.
pub fn layer_norm(norm: &LayerNorm, epsilon: f64, x: Tensor<2>) -> Tensor<2> {
    match &norm.beta {
        Some(beta) if supports(&x) && has_type(x.dtype(), [&norm.gamma.val(), &beta.val()]) => {
            route::layer_norm(x, norm.gamma.val(), beta.val(), epsilon as f32)
        }
        _ => norm.forward(x),
    }
}

/// Computes [`layer_norm`](fn@layer_norm) with the scale `gamma` and the shift `beta`.
pub fn layer_norm_of([gamma, beta]: [Tensor<1>; 2], epsilon: f64, x: Tensor<2>) -> Tensor<2> {
    if supports(&x) && has_type(x.dtype(), [&gamma, &beta]) {
        route::layer_norm(x, gamma, beta, epsilon as f32)
    } else {
        composed::layer_norm(&x, gamma, beta, epsilon)
    }
}

/// Returns true if both vectors have this type.
fn has_type(dtype: DType, vectors: [&Tensor<1>; 2]) -> bool {
    vectors.iter().all(|vector| vector.dtype() == dtype)
}

/// Computes causal self-attention over the rows of `qkv`: adjacent queries, keys and values, each split into heads.
///
/// # Shapes
///
/// - qkv: `[batch * time, 3 * dim]`
/// - output: `[batch * time, dim]`
pub fn causal_attention(qkv: Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
    if supports(&qkv) {
        route::causal_attention(qkv, batch, heads)
    } else {
        composed::causal_attention(&qkv, batch, heads)
    }
}

/// Computes [`causal_attention`] within documents that share sequences. `positions` are those of the tokens in their
/// documents, counted from 0. A token attends to itself and to as many tokens before it as its position says, or fewer if
/// `form` limits their number.
///
/// # Shapes
///
/// - qkv: `[batch * time, 3 * dim]`
/// - positions: `[batch, time]`
/// - output: `[batch * time, dim]`
pub fn document_attention(
    qkv: Tensor<2>,
    positions: Tensor<2, Int>,
    form: DocumentHeads,
) -> Tensor<2> {
    if supports(&qkv) {
        route::document_attention(qkv, positions, form)
    } else {
        composed::document_attention(&qkv, positions, form)
    }
}

/// Returns the negative log probability of the targets in f32, averaged over the rows.
///
/// # Panics
///
/// On Burn's CPU backend, if a target is negative or not below `vocab`.
///
/// # Shapes
///
/// - logits: `[rows, vocab]`
/// - targets: `[rows]`
/// - output: `[1]`
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    if supports(&logits) {
        route::cross_entropy(logits, targets)
    } else {
        composed::cross_entropy(logits, targets)
    }
}
