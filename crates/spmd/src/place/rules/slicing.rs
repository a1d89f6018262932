//! Slices, assignment to slices, concatenation and repetition.

use burn::tensor::Slice;
use burn_ir::{BaseOperationIr as Base, OperationIr};

use crate::place::signature::{Letter, Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    Some(match super::base::base(operation)? {
        Base::Slice(op) => {
            let letters = untouched(&op.tensor.shape.to_vec(), &op.ranges);
            Signature::new()
                .input_of(&op.tensor, letters.clone())
                .output_of(&op.out, letters)
                .linear_in([&op.tensor])
        }
        Base::SliceAssign(op) => {
            let letters = untouched(&op.tensor.shape.to_vec(), &op.ranges);
            Signature::new()
                .input_of(&op.tensor, letters.clone())
                .input_of(&op.value, letters.clone())
                .output_of(&op.out, letters)
                .linear_in([&op.tensor, &op.value])
        }
        Base::Cat(op) => {
            let mut letters = alphabet(op.out.shape.num_dims());
            letters[op.dim] = None;
            let signature = op.tensors.iter().fold(Signature::new(), |s, tensor| {
                s.input_of(tensor, letters.clone())
            });
            signature.output_of(&op.out, letters).linear_in(&op.tensors)
        }
        Base::RepeatDim(op) => {
            let mut letters = alphabet(op.out.shape.num_dims());
            letters[op.dim] = None;
            Signature::new()
                .input_of(&op.tensor, letters.clone())
                .output_of(&op.out, letters)
                .linear_in([&op.tensor])
        }
        _ => return None,
    })
}

/// Returns the letters of the dims that the ranges take whole.
fn untouched(shape: &[usize], ranges: &[Slice]) -> Vec<Option<Letter>> {
    let mut letters = alphabet(shape.len());
    for ((letter, size), range) in letters.iter_mut().zip(shape).zip(ranges) {
        if !is_full(range, *size) {
            *letter = None;
        }
    }
    letters
}

fn is_full(range: &Slice, size: usize) -> bool {
    let ends = range.end.is_none_or(|end| end == size as isize);
    range.start == 0 && range.step == 1 && ends
}

/// Shortens the ranges of sharded dims, which the slice takes whole.
pub(super) fn localize(operation: &mut OperationIr) {
    let (OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base)) =
        operation
    else {
        return;
    };
    let (shape, ranges) = match base {
        Base::Slice(op) => (op.tensor.shape.to_vec(), &mut op.ranges),
        Base::SliceAssign(op) => (op.tensor.shape.to_vec(), &mut op.ranges),
        _ => return,
    };
    for (range, size) in ranges.iter_mut().zip(shape) {
        let end = range.end.unwrap_or(size as isize);
        // Only a dim that was taken whole can be shorter now.
        if range.start == 0 && range.step == 1 && end > size as isize {
            range.end = Some(size as isize);
        }
    }
}
