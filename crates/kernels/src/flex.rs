//! The kernels on Burn's CPU backend, which computes them.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use crate::attention::cpu as attention;
use crate::backend::Kernels;
use crate::cross_entropy::cpu as cross_entropy;
use crate::documents::DocumentHeads;
use crate::gelu::cpu as gelu;
use crate::norm::cpu as norm;

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
        norm::forward(x, gamma, beta, epsilon)
    }

    fn layer_norm_gradients(
        x: FlexTensor,
        gamma: FlexTensor,
        grad: FlexTensor,
        epsilon: f32,
    ) -> [FlexTensor; 3] {
        norm::backward(x, gamma, grad, epsilon)
    }

    fn causal_attention_kernel(qkv: FlexTensor, batch: usize, heads: usize) -> FlexTensor {
        attention::causal(qkv, batch, heads)
    }

    fn causal_attention_gradient(
        qkv: FlexTensor,
        grad: FlexTensor,
        batch: usize,
        heads: usize,
    ) -> FlexTensor {
        attention::causal_gradient(qkv, grad, batch, heads)
    }

    fn document_attention_kernel(
        qkv: FlexTensor,
        positions: FlexTensor,
        form: DocumentHeads,
    ) -> FlexTensor {
        attention::in_documents(qkv, &positions, form)
    }

    fn document_attention_gradient(
        qkv: FlexTensor,
        grad: FlexTensor,
        positions: FlexTensor,
        form: DocumentHeads,
    ) -> FlexTensor {
        attention::in_documents_gradient(qkv, grad, &positions, form)
    }

    fn cross_entropy_kernel(logits: FlexTensor, targets: FlexTensor) -> [FlexTensor; 2] {
        cross_entropy::forward(logits, &targets)
    }

    fn cross_entropy_gradient(logits_gradient: FlexTensor, grad: FlexTensor) -> FlexTensor {
        cross_entropy::backward(logits_gradient, grad)
    }
}
