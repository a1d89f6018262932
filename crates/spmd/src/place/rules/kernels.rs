//! Kernels that replace composed operations in each rank's graph. These signatures are only for types, and place
//! nothing.
//!
//! The gradients that a kernel computes are linear in the gradient of its result, which may be addends.

#[cfg(test)]
mod tests;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::{CustomOpIr, TensorIr};

use crate::place::signature::{Letter, Signature, alphabet};

/// Dim of the batch in queries, keys and values.
const BATCH: Option<Letter> = Some('b');

/// Dim of the queries.
const QUERIES: Option<Letter> = Some('q');

/// Dim of the heads.
const HEADS: Option<Letter> = Some('h');

/// Dim of the width of values.
const WIDTH: Option<Letter> = Some('w');

/// Returns the signature of a kernel that [`UseKernels`](crate::passes::UseKernels) puts into a graph.
pub(super) fn signature(call: &CustomOpIr) -> Option<Signature> {
    use FusedOperation as Op;
    let kernel = FusedOperation::named(&call.id)?;
    let signature = match kernel {
        Op::Gelu
        | Op::GeluBackward
        | Op::Silu
        | Op::SiluBackward
        | Op::SwiGlu
        | Op::SwiGluBackward => by_element(call),
        Op::Softmax
        | Op::SoftmaxBackward
        | Op::LogSoftmax
        | Op::LogSoftmaxBackward
        | Op::LogLikelihood
        | Op::LogLikelihoodBackward
        | Op::LayerNorm
        | Op::RmsNorm => by_row(call),
        Op::LayerNormBackward | Op::RmsNormBackward => {
            // The gradients of a row's scale and shift are sums over rows.
            let rows = rows(call.inputs.first()?);
            let summed = rows.into_iter().flatten();
            summed.fold(by_row(call), Signature::sums)
        }
        Op::Attention => attention(call, 3),
        // The gradients of keys and values are sums over queries. The gradients of queries and keys are sums over the
        // width of values.
        Op::AttentionBackward => attention(call, 4).sums('q').sums('w'),
        _ => return None,
    };
    let gradient = of_result(kernel).map(|index| call.inputs.get(index));
    Some(match gradient {
        Some(gradient) => signature.linear_in(gradient),
        None => signature,
    })
}

/// Returns the index of the input that is the result's gradient, for a kernel that computes gradients.
fn of_result(kernel: FusedOperation) -> Option<usize> {
    use FusedOperation as Op;
    match kernel {
        Op::GeluBackward | Op::SiluBackward | Op::SoftmaxBackward | Op::LogSoftmaxBackward => {
            Some(1)
        }
        Op::SwiGluBackward | Op::LayerNormBackward | Op::RmsNormBackward => Some(2),
        Op::AttentionBackward | Op::LogLikelihoodBackward => Some(3),
        _ => None,
    }
}

/// Returns the signature of a function of each element.
fn by_element(call: &CustomOpIr) -> Signature {
    let letters = |tensor: &TensorIr| alphabet(tensor.shape.num_dims());
    of(call, letters)
}

/// Returns the signature of a function of rows along the last dim. Some of its operands apply to every row.
fn by_row(call: &CustomOpIr) -> Signature {
    of(call, rows)
}

fn rows(tensor: &TensorIr) -> Vec<Option<Letter>> {
    let mut letters = alphabet(tensor.shape.num_dims());
    letters.pop();
    letters
}

/// Returns the signature of attention or of its gradients. The first three inputs are queries, keys and values. For
/// gradients, the fourth of `num_rows` is the gradient of the result. The others are as large as scores, or have size
/// one along some of their dims.
fn attention(call: &CustomOpIr, num_rows: usize) -> Signature {
    let [queries, keys] = [0, 1].map(|index: usize| &call.inputs[index].shape);
    let of_queries = vec![BATCH, QUERIES, HEADS, None];
    let of_keys = vec![BATCH, None, HEADS, None];
    let of_values = vec![BATCH, None, HEADS, WIDTH];
    let of_result = vec![BATCH, QUERIES, HEADS, WIDTH];
    let of_scores = |tensor: &TensorIr| {
        let full = [queries[0], queries[2], queries[1], keys[1]];
        let letters = [BATCH, HEADS, QUERIES, None].into_iter().zip(full);
        let own = letters.zip(tensor.shape.to_vec());
        own.map(|((letter, full), own)| letter.filter(|_| full == own))
            .collect()
    };
    let operands = [of_queries, of_keys, of_values, of_result.clone()];
    let rows = operands
        .iter()
        .take(num_rows)
        .map(Some)
        .chain(std::iter::repeat(None));
    let inputs = call.inputs.iter().zip(rows);
    let signature = inputs.fold(Signature::new(), |signature, (tensor, rows)| {
        let letters = rows.map_or_else(|| of_scores(tensor), Clone::clone);
        signature.input_of(tensor, letters)
    });
    let results = match call.outputs.len() {
        1 => vec![of_result],
        _ => operands[..3].to_vec(),
    };
    let outputs = call.outputs.iter().zip(results);
    outputs.fold(signature, |signature, (tensor, letters)| {
        signature.output_of(tensor, letters)
    })
}

/// Returns the signature of operands with these letters.
fn of(call: &CustomOpIr, letters: impl Fn(&TensorIr) -> Vec<Option<Letter>>) -> Signature {
    let signature = call.inputs.iter().fold(Signature::new(), |s, tensor| {
        s.input_of(tensor, letters(tensor))
    });
    call.outputs
        .iter()
        .fold(signature, |s, tensor| s.output_of(tensor, letters(tensor)))
}
