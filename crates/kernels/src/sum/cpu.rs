//! Sums along a dim, with columns divided among threads. Halves are summed in 32 bits and rounded once.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, bf16};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::halves::{narrow, widened, zeros};
use crate::rows::contiguous;
use crate::vectors::{Kernel, vectorized};

/// Number of columns that a thread adds at a time: a few cache lines of a row, so even a few hundred columns are
/// divided among threads.
const COLUMNS: usize = 64;

/// Returns the sums along a dim, which then has one element. Addends are added in order, as in Burn's CPU backend, so
/// the sums have the same bits.
pub(crate) fn sum_dim(x: FlexTensor, dim: usize) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (rows, columns) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
    if x.dtype() != DType::BF16 && (columns <= 1 || !x.is_contiguous()) {
        // Here Burn adds in a different order.
        return Flex::float_sum_dim(x, dim);
    }
    let x = contiguous(x);
    let mut of_sums = shape;
    of_sums[dim] = 1;
    let mut sums = zeros(of_sums, x.dtype());
    if columns == 0 || rows == 0 {
        return sums;
    }
    match x.dtype() {
        DType::BF16 => add_columns(x.storage(), rows, columns, sums.storage_mut(), add_halves),
        _ => add_columns(x.storage(), rows, columns, sums.storage_mut(), add_floats),
    }
    sums
}

/// Calls `add` for groups of columns of each matrix of rows, with the columns and their sums, which are initially zero.
fn add_columns<T: Send + Sync>(
    x: &[T],
    rows: usize,
    columns: usize,
    sums: &mut [T],
    add: fn(Columns<'_, T>, &mut [T]),
) {
    let matrices = sums.par_chunks_mut(columns).enumerate();
    matrices.for_each(|(matrix, sums)| {
        let x = &x[matrix * rows * columns..][..rows * columns];
        let parts = sums.par_chunks_mut(COLUMNS).enumerate();
        parts.for_each(|(part, sums)| {
            let first = part * COLUMNS;
            add(Columns { x, columns, first }, sums);
        });
    });
}

/// The columns of a matrix, starting at `first`.
struct Columns<'a, T> {
    x: &'a [T],
    columns: usize,
    first: usize,
}

fn add_floats(of: Columns<'_, f32>, sums: &mut [f32]) {
    vectorized(Add {
        of,
        sums,
        float: |x| x,
    });
}

fn add_halves(of: Columns<'_, bf16>, sums: &mut [bf16]) {
    let mut floats = [0.0; COLUMNS];
    let floats = &mut floats[..sums.len()];
    vectorized(Add {
        of,
        sums: floats,
        float: widened,
    });
    narrow(floats, sums);
}

struct Add<'a, T, F> {
    of: Columns<'a, T>,
    sums: &'a mut [f32],
    float: F,
}

impl<T: Copy, F: Fn(T) -> f32> Kernel for Add<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Columns { x, columns, first } = self.of;
        for row in x.chunks_exact(columns) {
            let row = &row[first..first + self.sums.len()];
            for (sum, x) in self.sums.iter_mut().zip(row) {
                *sum += (self.float)(*x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    #[track_caller]
    fn assert_burns_bits(x: FlexTensor, dim: usize) {
        let expected = Flex::float_sum_dim(x.clone(), dim);
        let found = sum_dim(x, dim);
        assert_eq!(found.layout().shape(), expected.layout().shape());
        let bytes = |tensor: FlexTensor| tensor.into_data().as_bytes().to_vec();
        assert_eq!(bytes(found), bytes(expected));
    }

    #[test]
    fn sums_match_burn_bit_for_bit() {
        for (shape, dim) in [
            (&[70, 1030][..], 0),
            (&[3, 41, 7], 1),
            (&[2, 5, 3, 4], 0),
            (&[5, 6], 1),
            (&[1, 9], 0),
            (&[1, 4099], 0),
            (&[3, 4099, 1], 1),
            (&[300, 1100], 0),
        ] {
            let len = shape.iter().product();
            let value = |at: usize| ((at * 7919 % 1013) as f32 - 506.0) / 97.0;
            let halves: Vec<bf16> = (0..len).map(|at| bf16::from_f32(value(at))).collect();
            let x = FlexTensor::from_data(TensorData::new(halves, shape.to_vec()));
            assert_burns_bits(x, dim);
            let floats: Vec<f32> = (0..len).map(|at| value(at) / 3.0).collect();
            let x = FlexTensor::from_data(TensorData::new(floats, shape.to_vec()));
            assert_burns_bits(x.clone(), dim);
            // A tensor in a different memory order, and a slice of a tensor.
            let last = shape.len() - 1;
            assert_burns_bits(x.transpose(0, last), dim);
            assert_burns_bits(x.narrow(0, shape[0] / 2, shape[0] - shape[0] / 2), dim);
            if shape[last] > 1 {
                assert_burns_bits(x.narrow(last, 1, shape[last] - 1), dim);
            }
        }
    }
}
