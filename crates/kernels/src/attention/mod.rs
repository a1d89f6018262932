//! Causal attention over one packed tensor, of whole sequences or within documents, and attention with any masks over
//! queries, keys and values.
//!
//! - `composed`: the composed forms.
//! - `cpu`: the kernels. `factors`: factors on probabilities, as in dropout. `heads`: the operands, split into heads and
//!   blocks of queries. `mask`: the keys that a query attends to.
//! - `pattern`: the operations that attention replaces.

mod composed;
mod cpu;
mod factors;
mod heads;
mod mask;
mod pattern;
#[cfg(test)]
mod tests;

use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, ScalarIr};

use crate::contract::{
    Composed, FusedCost, FusedKernel, KernelCheck, KernelDims, KernelPattern, KernelPlacement,
    KernelRecord, Letters, size,
};
use crate::documents::DocumentHeads;
use crate::form::{FormCall, Number};
use cpu::Weighting;
use factors::Factors;
use mask::Fill;

/// Inputs: qkv, positions. Outputs: y. Scalars: batch, heads, reach.
///
/// Positions, `[batch, time]`, are integers: those of tokens in their documents. A query sees as many tokens before its
/// own as its position says, and its reach at most, including its own. A reach of 0 is none. If all tokens of a sequence
/// are one document, both the positions and the reach are absent.
pub(crate) struct CausalAttention;

impl FusedKernel for CausalAttention {
    const RECORD: KernelRecord = KernelRecord {
        cost: |call| causal_cost(call, 2),
        check: KernelCheck {
            // Any position is valid. Those that are in the sequence show the most keys.
            indices: |call| Some((1, call.inputs.get(1)?.shape[1])),
            ..KernelCheck::DEFAULT
        },
        ..KernelRecord::new("models.causal_attention", |call, inputs| {
            let mut inputs = inputs.into_iter();
            let qkv = operand(&mut inputs);
            vec![match inputs.next() {
                Some(positions) => cpu::in_documents(qkv, &positions, documents(call)),
                None => cpu::causal(qkv, size(call, 0), size(call, 1)),
            }]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let ([qkv], positions) = call.first_operands()?;
        let causal = composed::Causal::of(call, qkv, positions)?;
        Ok(vec![causal.result(qkv)?])
    }
}

/// Inputs: qkv, gradient of y, positions. Outputs: gradient of qkv. Scalars: as for [`CausalAttention`].
pub(crate) struct CausalAttentionBackward;

impl FusedKernel for CausalAttentionBackward {
    const RECORD: KernelRecord = KernelRecord {
        cost: |call| causal_cost(call, 5),
        ..KernelRecord::new("models.causal_attention_backward", |call, inputs| {
            let mut inputs = inputs.into_iter();
            let (qkv, grad) = (operand(&mut inputs), operand(&mut inputs));
            vec![match inputs.next() {
                Some(positions) => {
                    cpu::in_documents_gradient(qkv, grad, &positions, documents(call))
                }
                None => cpu::causal_gradient(qkv, grad, size(call, 0), size(call, 1)),
            }]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let ([qkv, grad], positions) = call.first_operands()?;
        let causal = composed::Causal::of(call, qkv, positions)?;
        Ok(vec![causal.gradient(qkv, grad)?])
    }
}

const QUERIES: Letters = Letters::Named("bqh.");
const KEYS: Letters = Letters::Named("b.h.");
const VALUES: Letters = Letters::Named("b.hw");
const RESULT: Letters = Letters::Named("bqhw");
/// Masks and factors have the shape of the scores, or size one in some dims.
const SCORES: Letters = Letters::Fitting("bhq.");

/// Inputs: queries, keys, values, masks, factors. Outputs: the result. Scalars: factor on the scores, number for each
/// mask, factor on all probabilities.
///
/// Queries, keys, values and the result are `[batch, time, heads, width]`. A mask contains bools, `[batch or 1, heads or
/// 1, queries or 1, keys or 1]`. The mask's number replaces the scaled score wherever the mask is set. Factors, `[batch,
/// heads, queries, keys]`, multiply the probabilities, as in dropout. If there are no factors, both the input and the
/// common factor are absent.
pub(crate) struct Attention;

impl FusedKernel for Attention {
    const RECORD: KernelRecord = KernelRecord {
        cost: |call| attention_cost(call, 2),
        placement: KernelPlacement::Dims(KernelDims::of(
            &[QUERIES, KEYS, VALUES, SCORES],
            &[RESULT],
        )),
        pattern: KernelPattern::Found(pattern::replace),
        ..KernelRecord::new(pattern::ATTENTION, |call, inputs| {
            let mut inputs = inputs.into_iter();
            let operands = [(); 3].map(|()| operand(&mut inputs));
            vec![cpu::weighted(operands, weighting(call, inputs, 3))]
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let ([queries, keys, values], behind) = call.first_operands()?;
        let attention = composed::Attention::of(call, [queries, keys, values], behind)?;
        Ok(vec![attention.result()?])
    }
}

/// Inputs: queries, keys, values, gradient of the result, masks, factors. Outputs: gradients of queries, keys, values.
/// Scalars: as for [`Attention`].
pub(crate) struct AttentionBackward;

impl FusedKernel for AttentionBackward {
    const RECORD: KernelRecord = KernelRecord {
        cost: |call| attention_cost(call, 5),
        // The gradients of keys and values are sums over queries. The gradients of queries and keys are sums over the
        // width of values.
        placement: KernelDims::of(
            &[QUERIES, KEYS, VALUES, RESULT, SCORES],
            &[QUERIES, KEYS, VALUES],
        )
        .summed(Letters::Named("qw"))
        .linear_in(3),
        ..KernelRecord::new(pattern::GRADIENT, |call, inputs| {
            let mut inputs = inputs.into_iter();
            let operands = [(); 3].map(|()| operand(&mut inputs));
            let grad = operand(&mut inputs);
            cpu::weighted_gradients(operands, &grad, weighting(call, inputs, 4)).into()
        })
    };

    fn composed<N: Number>(call: &FormCall<'_, N>) -> Composed<N> {
        let ([queries, keys, values, grad], behind) = call.first_operands()?;
        let attention = composed::Attention::of(call, [queries, keys, values], behind)?;
        Ok(attention.gradients(grad)?.into())
    }
}

fn operand(inputs: &mut impl Iterator<Item = FlexTensor>) -> FlexTensor {
    inputs.next().expect("a captured call has all its inputs")
}

/// Returns the work of causal attention, or of its gradient, in this number of products.
fn causal_cost(call: &CustomOpIr, num_products: usize) -> FusedCost {
    let (shape, heads) = (&call.inputs[0].shape, size(call, 1));
    let time = shape[0] / size(call, 0).max(1);
    // On average, a query attends to half of the keys.
    let width = heads * (shape[1] / 3 / heads.max(1));
    let pairs = shape[0] * (time + 1) / 2;
    FusedCost::of_elements(call).with_products(num_products * pairs * width)
}

/// Returns the work of attention, or of its gradients, in this number of products.
fn attention_cost(call: &CustomOpIr, num_products: usize) -> FusedCost {
    let [queries, keys] = [0, 1].map(|index: usize| &call.inputs[index].shape);
    let (pairs, width) = (queries[0] * queries[1] * keys[1], queries[2] * queries[3]);
    FusedCost::of_elements(call).with_products(num_products * pairs * width)
}

/// Returns the heads of a call of causal attention within documents.
fn documents(call: &CustomOpIr) -> DocumentHeads {
    let reach = size(call, 2);
    DocumentHeads {
        heads: size(call, 1),
        reach: (reach > 0).then_some(reach),
    }
}

/// Returns the weighting of a call from its scalars and the inputs that follow the first `num_operands`. The last input
/// holds factors if it is neither a mask nor one of these.
fn weighting(
    call: &CustomOpIr,
    inputs: impl Iterator<Item = FlexTensor>,
    num_operands: usize,
) -> Weighting {
    let mut inputs: Vec<FlexTensor> = inputs.collect();
    let number = |scalar: &ScalarIr| scalar.elem::<f32>();
    let last = call.inputs[num_operands..].last();
    let factors = last.filter(|last| last.dtype.is_float());
    let factors = factors.and_then(|_| inputs.pop());
    let last = call.scalars.last().map_or(1.0, number);
    let fill = |(mask, value): (FlexTensor, &ScalarIr)| Fill {
        mask,
        value: number(value),
    };
    Weighting {
        scale: number(&call.scalars[0]),
        fills: inputs
            .into_iter()
            .zip(&call.scalars[1..])
            .map(fill)
            .collect(),
        factors: factors.map(|factors| Factors::new(factors, last)),
    }
}
