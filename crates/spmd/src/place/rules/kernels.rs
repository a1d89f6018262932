//! Kernels that replace composed operations in each rank's graph. Only type checks use these signatures; placements are
//! already chosen.
//!
//! Gradient kernels are linear in the gradient of the result, which may therefore be addends.

#[cfg(test)]
mod tests;

use burn_fsdp_kernels::{FusedOperation, KernelPlacement, Letters};
use burn_ir::{CustomOpIr, TensorIr};

use crate::place::signature::{Letter, Operand, Signature, alphabet, spelled};

/// Returns the signature of a kernel that [`UseKernels`](crate::passes::UseKernels) puts into a graph.
pub(super) fn signature(call: &CustomOpIr) -> Option<Signature> {
    let kernel = FusedOperation::named(&call.id)?.record();
    let KernelPlacement::Dims(dims) = kernel.placement else {
        return None;
    };
    let of = |all: &[Letters], index: usize| {
        let last = all.last().copied().unwrap_or(Letters::Named(""));
        all.get(index).copied().unwrap_or(last)
    };
    let mut signature = Signature::new();
    for (index, input) in call.inputs.iter().enumerate() {
        let letters = letters(of(dims.inputs, index), input, &signature.inputs);
        signature = signature.input_of(input, letters);
    }
    for (index, output) in call.outputs.iter().enumerate() {
        let letters = letters(of(dims.outputs, index), output, &signature.inputs);
        signature = signature.output_of(output, letters);
    }
    let summed = letters(dims.sums, call.inputs.first()?, &[]);
    let signature = summed
        .into_iter()
        .flatten()
        .fold(signature, Signature::sums);
    Some(match dims.linear_in {
        Some(index) => signature.linear_in(call.inputs.get(index)),
        None => signature,
    })
}

/// Returns the letter of each dim of a tensor that follows other inputs.
fn letters(of: Letters, tensor: &TensorIr, before: &[Operand]) -> Vec<Option<Letter>> {
    match of {
        Letters::Each => alphabet(tensor.shape.num_dims()),
        Letters::Rows => {
            let mut letters = alphabet(tensor.shape.num_dims());
            letters.pop();
            letters
        }
        Letters::Named(letters) => spelled(letters),
        Letters::Fitting(letters) => {
            let size = |letter: Letter| {
                let mut sizes = before
                    .iter()
                    .filter_map(|of| Some(of.shape[of.dim_of(letter)?]));
                sizes.next()
            };
            let own = spelled(letters).into_iter().zip(tensor.shape.to_vec());
            own.map(|(letter, own)| letter.filter(|letter| size(*letter) == Some(own)))
                .collect()
        }
    }
}
