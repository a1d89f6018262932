//! Reshapes, permutations and expansions.

use burn_ir::{BaseOperationIr as Base, OperationIr, TensorIr};

use crate::place::signature::{Letter, Signature, aligned, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let (signature, input) = match super::base::base(operation)? {
        Base::Reshape(op) => (reshaped(&op.input, &op.out), &op.input),
        Base::Expand(op) => {
            let shape = op.out.shape.to_vec();
            let signature = Signature::new()
                .input_of(&op.input, aligned(&op.input, &shape))
                .output_of(&op.out, alphabet(shape.len()));
            (signature, &op.input)
        }
        Base::SwapDims(op) => {
            let letters = alphabet(op.input.shape.num_dims());
            let mut swapped = letters.clone();
            swapped.swap(op.dim1, op.dim2);
            (same(&op.input, letters, &op.out, swapped), &op.input)
        }
        Base::Permute(op) => {
            let letters = alphabet(op.input.shape.num_dims());
            let permuted = op.axes.iter().map(|axis| letters[*axis]).collect();
            (same(&op.input, letters, &op.out, permuted), &op.input)
        }
        Base::Flip(op) => {
            let mut letters = alphabet(op.input.shape.num_dims());
            for axis in &op.axes {
                letters[*axis] = None;
            }
            (
                same(&op.input, letters.clone(), &op.out, letters),
                &op.input,
            )
        }
        Base::Unfold(op) => {
            let mut letters = alphabet(op.input.shape.num_dims());
            letters[op.dim] = None;
            (
                same(&op.input, letters.clone(), &op.out, letters),
                &op.input,
            )
        }
        _ => return None,
    };
    Some(signature.linear_in([input]))
}

fn same(
    input: &TensorIr,
    letters: Vec<Option<Letter>>,
    out: &TensorIr,
    out_letters: Vec<Option<Letter>>,
) -> Signature {
    Signature::new()
        .input_of(input, letters)
        .output_of(out, out_letters)
}

/// Returns the signature of a reshape. Dims that are merged or split form a group. Its outermost input dim and its
/// outermost output dim have the same letter.
fn reshaped(input: &TensorIr, out: &TensorIr) -> Signature {
    let (from, to) = (input.shape.to_vec(), out.shape.to_vec());
    let (mut letters, mut out_letters) = (vec![None; from.len()], vec![None; to.len()]);
    let mut names = alphabet(from.len()).into_iter().flatten();
    for (outermost, out_outermost) in groups(&from, &to) {
        let name = names.next();
        letters[outermost] = name;
        out_letters[out_outermost] = name;
    }
    same(input, letters, out, out_letters)
}

/// Groups input and output dims of equal product. Returns the outermost on each side, ignoring dims of size 1.
fn groups(from: &[usize], to: &[usize]) -> Vec<(usize, usize)> {
    let real = |shape: &[usize]| -> Vec<(usize, usize)> {
        let dims = shape.iter().copied().enumerate();
        dims.filter(|(_, size)| *size != 1).collect()
    };
    let (from, to) = (real(from), real(to));
    let (mut i, mut j) = (0, 0);
    let mut found = Vec::new();
    while i < from.len() && j < to.len() {
        found.push((from[i].0, to[j].0));
        let (mut a, mut b) = (from[i].1, to[j].1);
        (i, j) = (i + 1, j + 1);
        while a != b {
            if a < b {
                let Some((_, size)) = from.get(i) else {
                    return found;
                };
                a *= size;
                i += 1;
            } else {
                let Some((_, size)) = to.get(j) else {
                    return found;
                };
                b *= size;
                j += 1;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn dims_are_grouped_by_their_products() {
        assert_eq!(groups(&[2, 3, 8], &[2, 3, 4, 2]), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(groups(&[2, 3, 8], &[6, 8]), [(0, 0), (2, 1)]);
        assert_eq!(groups(&[6, 8], &[1, 2, 3, 8]), [(0, 1), (1, 3)]);
        assert_eq!(groups(&[4, 6], &[8, 3]), [(0, 0)]);
        assert_eq!(groups(&[1], &[1, 1]), []);
    }
}
