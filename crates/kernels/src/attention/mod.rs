//! Causal attention over one packed tensor, and attention with any masks over queries, keys and values.
//!
//! - `factors`: factors on probabilities, as in dropout.
//! - `heads`: the operands, split into heads and blocks of queries.
//! - `mask`: the keys that a query attends to.

mod factors;
mod heads;
mod mask;
#[cfg(test)]
mod tests;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn_flex::FlexTensor;

use crate::backend::Kernels;
use crate::rows::contiguous;
pub(crate) use factors::Factors;
use heads::Operands;
pub(crate) use mask::Fill;
use mask::Mask;

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

/// Computes causal self-attention of packed queries, keys and values: `[batch * time, 3 * dim]` to
/// `[batch * time, dim]`.
pub(crate) fn causal(qkv: FlexTensor, batch: usize, heads: usize) -> FlexTensor {
    let rows = qkv.layout().shape()[0];
    let output = Operands::packed(contiguous(qkv), batch, heads).forward();
    let width = output.layout().num_elements() / rows.max(1);
    output.reshape([rows, width].into())
}

/// Returns the gradient of [`causal`]'s input.
pub(crate) fn causal_gradient(
    qkv: FlexTensor,
    grad: FlexTensor,
    batch: usize,
    heads: usize,
) -> FlexTensor {
    let shape = qkv.layout().shape().clone();
    let operands = Operands::packed(contiguous(qkv), batch, heads);
    let (time, head_dim) = (operands.times()[0], operands.widths()[2]);
    let grad = contiguous(grad).reshape([batch, time, heads, head_dim].into());
    operands.packed_gradient(&grad).reshape(shape)
}

/// The changes to the scores and probabilities of an attention.
pub(crate) struct Weighting {
    /// The factor that multiplies the scores.
    pub(crate) scale: f32,
    /// The masks, with the numbers that replace scores where they are set.
    pub(crate) fills: Vec<Fill>,
    /// The factors that multiply the probabilities, if any.
    pub(crate) factors: Option<Factors>,
}

impl Weighting {
    fn of(self, qkv: [FlexTensor; 3]) -> Operands {
        Operands::apart(qkv, self.scale, Mask::Filled(self.fills), self.factors)
    }
}

/// Computes attention from queries, keys and values, each `[batch, time, heads, width]`. Returns the output, `[batch,
/// time of queries, heads, width of values]`.
pub(crate) fn weighted(qkv: [FlexTensor; 3], weighting: Weighting) -> FlexTensor {
    weighting.of(qkv).forward()
}

/// Returns the gradients of [`weighted`]'s queries, keys and values.
pub(crate) fn weighted_gradients(
    qkv: [FlexTensor; 3],
    grad: &FlexTensor,
    weighting: Weighting,
) -> [FlexTensor; 3] {
    weighting.of(qkv).gradients(grad)
}
