use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor};

use crate::fused;

/// Mean over the rows of minus the log probability of the target, in f32.
///
/// # Shapes
///
/// - logits: `[rows, vocab]`
/// - targets: `[rows]`
/// - output: `[1]`
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    if fused::supports(&logits) {
        fused::cross_entropy(logits, targets)
    } else {
        composed(logits, targets)
    }
}

/// The same of elementary operations, for any backend.
pub(crate) fn composed(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let logits = logits.cast(DType::F32);
    log_softmax(logits, 1)
        .gather(1, targets.unsqueeze_dim(1))
        .mean()
        .neg()
}
