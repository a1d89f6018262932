//! Kernels that replace composed operations in each rank's graph. Only type checks use these signatures; placements are
//! already chosen.
//!
//! Gradient kernels are linear in the gradient of the result, which may therefore be addends.

#[cfg(test)]
mod tests;

use burn_fsdp_kernels::FusedOperation;
use burn_ir::{CustomOpIr, TensorIr};

use crate::place::signature::{Letter, Signature, alphabet};

/// Letter of the batch dim in queries, keys and values.
const BATCH: Option<Letter> = Some('b');

/// Letter of the query dim.
const QUERIES: Option<Letter> = Some('q');

/// Letter of the head dim.
const HEADS: Option<Letter> = Some('h');

/// Letter of the width dim of values.
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

/// Returns the index of the input that is the gradient of the result; `None` if the kernel does not compute gradients.
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

/// Returns the signature of an elementwise kernel.
fn by_element(call: &CustomOpIr) -> Signature {
    let letters = |tensor: &TensorIr| alphabet(tensor.shape.num_dims());
    of(call, letters)
}

/// Returns the signature of a kernel that computes row by row along the last dim. Some of its operands apply to every
/// row.
fn by_row(call: &CustomOpIr) -> Signature {
    of(call, rows)
}

fn rows(tensor: &TensorIr) -> Vec<Option<Letter>> {
    let mut letters = alphabet(tensor.shape.num_dims());
    letters.pop();
    letters
}

/// Returns the signature of attention or of its gradients. The first `num_rows` inputs are queries, keys and values
/// and, for gradients, the gradient of the result. All other inputs have the shape of the scores, or size one in some
/// dims.
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

/// Returns the signature in which `letters` names the dims of every operand and result.
fn of(call: &CustomOpIr, letters: impl Fn(&TensorIr) -> Vec<Option<Letter>>) -> Signature {
    let signature = call.inputs.iter().fold(Signature::new(), |s, tensor| {
        s.input_of(tensor, letters(tensor))
    });
    call.outputs
        .iter()
        .fold(signature, |s, tensor| s.output_of(tensor, letters(tensor)))
}
