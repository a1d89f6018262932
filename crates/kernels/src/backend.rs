//! The operations that a backend must implement.

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};

use crate::documents::DocumentHeads;

/// The fused operations and their gradients, computed or recorded by a backend.
pub(crate) trait Kernels: Backend {
    fn gelu_kernel(x: FloatTensor<Self>) -> FloatTensor<Self>;

    fn gelu_gradient(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    fn layer_norm_kernel(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self>;

    /// Returns the gradients of input, gamma and beta.
    fn layer_norm_gradients(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        epsilon: f32,
    ) -> [FloatTensor<Self>; 3];

    fn causal_attention_kernel(
        qkv: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self>;

    fn causal_attention_gradient(
        qkv: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        batch: usize,
        heads: usize,
    ) -> FloatTensor<Self>;

    fn document_attention_kernel(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        form: DocumentHeads,
    ) -> FloatTensor<Self>;

    fn document_attention_gradient(
        qkv: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        positions: IntTensor<Self>,
        form: DocumentHeads,
    ) -> FloatTensor<Self>;

    /// Returns two tensors: the gradient of the logits, and the loss.
    fn cross_entropy_kernel(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> [FloatTensor<Self>; 2];

    /// Returns the gradient of the logits, multiplied by a one-element tensor.
    fn cross_entropy_gradient(
        logits_gradient: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}
