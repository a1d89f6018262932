//! Causal attention in models, with its gradient.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::{FloatTensor, IntTensor};

use crate::backend::Kernels;
use crate::documents::DocumentHeads;

#[derive(Debug)]
struct CausalAttention;

/// The input and sizes that the backward pass needs.
#[derive(Clone, Debug)]
struct Saved<T> {
    qkv: T,
    batch: usize,
    heads: usize,
}

impl<B: Kernels> Backward<B, 1> for CausalAttention {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Saved { qkv, batch, heads } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::causal_attention_gradient(qkv, grad, batch, heads)
        });
    }
}

pub(crate) fn tracked<B: Kernels, C: CheckpointStrategy>(
    qkv: FloatTensor<Autodiff<B, C>>,
    batch: usize,
    heads: usize,
) -> FloatTensor<Autodiff<B, C>> {
    let prepared = Backward::<B, 1>::prepare::<C>(CausalAttention, [qkv.node()])
        .compute_bound()
        .stateful();
    let qkv = qkv.into_primitive();
    let output = B::causal_attention_kernel(qkv.clone(), batch, heads);
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(Saved { qkv, batch, heads }, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

#[derive(Debug)]
struct DocumentAttention;

/// The inputs and sizes that the backward pass of an attention within documents needs.
#[derive(Clone, Debug)]
struct SavedDocuments<T, I> {
    qkv: T,
    positions: I,
    form: DocumentHeads,
}

impl<B: Kernels> Backward<B, 1> for DocumentAttention {
    type State = SavedDocuments<FloatTensor<B>, IntTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let SavedDocuments {
            qkv,
            positions,
            form,
        } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::document_attention_gradient(qkv, grad, positions, form)
        });
    }
}

pub(crate) fn tracked_documents<B: Kernels, C: CheckpointStrategy>(
    qkv: FloatTensor<Autodiff<B, C>>,
    positions: IntTensor<B>,
    form: DocumentHeads,
) -> FloatTensor<Autodiff<B, C>> {
    let prepared = Backward::<B, 1>::prepare::<C>(DocumentAttention, [qkv.node()])
        .compute_bound()
        .stateful();
    let qkv = qkv.into_primitive();
    let output = B::document_attention_kernel(qkv.clone(), positions.clone(), form);
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(
            SavedDocuments {
                qkv,
                positions,
                form,
            },
            output,
        ),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}
