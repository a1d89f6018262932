//! The operations composed of elementary ones, for any backend and type.

use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::documents::DocumentHeads;

/// Computes [`causal_attention`](crate::causal_attention) from elementary operations.
pub(crate) fn causal_attention(qkv: &Tensor<2>, batch: usize, heads: usize) -> Tensor<2> {
    masked_attention(qkv, [batch, heads], None)
}

/// Computes [`document_attention`](crate::document_attention) from elementary operations.
pub(crate) fn document_attention(
    qkv: &Tensor<2>,
    positions: Tensor<2, Int>,
    form: DocumentHeads,
) -> Tensor<2> {
    let [batch, _] = positions.dims();
    let hidden = other_documents(positions, form.reach);
    masked_attention(qkv, [batch, form.heads], Some(hidden))
}

/// Returns true for the keys before the first one that a query attends to: `[batch, 1, time, time]`. `positions` are
/// those of the tokens in their documents, `[batch, time]`. `reach` is the number of keys that a query attends to at most,
/// including its own.
pub fn other_documents(positions: Tensor<2, Int>, reach: Option<usize>) -> Tensor<4, Bool> {
    let [batch, time] = positions.dims();
    let index = |shape: [usize; 4]| {
        let index = Tensor::<1, Int>::arange(0..time as i64, &positions.device());
        index.reshape(shape).expand([batch, 1, time, time])
    };
    let before = match reach {
        Some(reach) => positions.clone().clamp_max(reach.saturating_sub(1) as i64),
        None => positions.clone(),
    };
    let before = before.reshape([batch, 1, time, 1]);
    let first = index([1, 1, time, 1]) - before.expand([batch, 1, time, time]);
    index([1, 1, 1, time]).lower(first)
}

fn masked_attention(
    qkv: &Tensor<2>,
    [batch, heads]: [usize; 2],
    hidden: Option<Tensor<4, Bool>>,
) -> Tensor<2> {
    let [rows, width] = qkv.dims();
    let (time, dim) = (rows / batch, width / 3);
    let head_dim = dim / heads;
    let mask = causal_mask(time, &qkv.device());
    let part = |index: usize| -> Tensor<4> {
        qkv.clone()
            .narrow(1, index * dim, dim)
            .reshape([batch, time, heads, head_dim])
            .swap_dims(1, 2)
    };
    let queries = part(0).mul_scalar((head_dim as f64).sqrt().recip());
    let mut scores = queries.matmul(part(1).transpose()) + mask.cast(qkv.dtype());
    if let Some(hidden) = hidden {
        let hidden = hidden.expand([batch, heads, time, time]);
        scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
    }
    softmax(scores, 3)
        .matmul(part(2))
        .swap_dims(1, 2)
        .reshape([rows, dim])
}

/// Returns zero for the keys that a position attends to, and minus infinity for later ones: `[1, 1, time, time]`.
fn causal_mask(time: usize, device: &Device) -> Tensor<4> {
    let position = |shape| Tensor::<1, Int>::arange(0..time as i64, device).reshape(shape);
    let ahead = position([1, 1, 1, time]).greater(position([1, 1, time, 1]));
    Tensor::zeros([1, 1, time, time], device).mask_fill(ahead, f32::NEG_INFINITY)
}

/// Computes [`layer_norm_of`](crate::layer_norm_of) from elementary operations.
pub(crate) fn layer_norm(
    x: &Tensor<2>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> Tensor<2> {
    let dtype = x.dtype();
    let x = x.clone().cast(DType::F32);
    let centered = x.clone() - x.mean_dim(1);
    let deviation = (centered.clone().square().mean_dim(1) + epsilon).sqrt();
    (centered / deviation).cast(dtype) * gamma.unsqueeze() + beta.unsqueeze()
}

/// Computes [`cross_entropy`](fn@crate::cross_entropy) from elementary operations.
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let logits = logits.cast(DType::F32);
    log_softmax(logits, 1)
        .gather(1, targets.unsqueeze_dim(1))
        .mean()
        .neg()
}
