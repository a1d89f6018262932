//! Causal attention over one packed tensor, of whole sequences or within documents, and attention with any masks over
//! queries, keys and values, on Burn's CPU backend.

use burn_flex::FlexTensor;

use super::factors::Factors;
use super::heads::Operands;
use super::mask::{Fill, Firsts, Mask};
use crate::documents::DocumentHeads;
use crate::rows::contiguous;

/// Computes [`causal`] attention within documents. `positions` are those of the tokens in their documents,
/// `[batch, time]`.
pub(crate) fn in_documents(
    qkv: FlexTensor,
    positions: &FlexTensor,
    form: DocumentHeads,
) -> FlexTensor {
    let (batch, firsts) = firsts(positions, form);
    let rows = qkv.layout().shape()[0];
    let operands = Operands::packed(contiguous(qkv), batch, form.heads).within(firsts);
    let output = operands.forward();
    let width = output.layout().num_elements() / rows.max(1);
    output.reshape([rows, width].into())
}

/// Returns the gradient of [`in_documents`]'s packed input.
pub(crate) fn in_documents_gradient(
    qkv: FlexTensor,
    grad: FlexTensor,
    positions: &FlexTensor,
    form: DocumentHeads,
) -> FlexTensor {
    let (batch, firsts) = firsts(positions, form);
    let operands = Operands::packed(contiguous(qkv), batch, form.heads).within(firsts);
    packed_gradient(&operands, grad)
}

/// Returns the number of sequences, and the first key of each query.
fn firsts(positions: &FlexTensor, form: DocumentHeads) -> (usize, Firsts) {
    let shape = positions.layout().shape();
    (shape[0], Firsts::of(positions, shape[1], form.reach))
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
    packed_gradient(&Operands::packed(contiguous(qkv), batch, heads), grad)
}

/// Returns the gradient of packed operands, `[batch * time, 3 * dim]`, from that of their output.
fn packed_gradient(operands: &Operands, grad: FlexTensor) -> FlexTensor {
    let [batch, time, heads, head_dim] = operands.output_dims();
    let grad = contiguous(grad).reshape([batch, time, heads, head_dim].into());
    let gradient = operands.packed_gradient(&grad);
    gradient.reshape([batch * time, 3 * heads * head_dim].into())
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
