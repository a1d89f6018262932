//! Sums of halves along a dim, in 32 bits, which are rounded once.

use burn::tensor::bf16;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::halves::{narrow, widened, zeros};
use crate::rows::contiguous;
use crate::vectors::{Kernel, vectorized};

/// Columns that a thread adds at a time.
const COLUMNS: usize = 512;

/// Returns the sums of halves along a dim, which then has one element. Addends are taken in their order, as Burn's CPU
/// backend does, so that the sums have the same bits.
pub(crate) fn sum_dim(x: FlexTensor, dim: usize) -> FlexTensor {
    let x = contiguous(x);
    let shape = x.layout().shape().clone();
    let (rows, columns) = (shape[dim], shape[dim + 1..].iter().product::<usize>());
    let mut of_sums = shape;
    of_sums[dim] = 1;
    let mut sums = zeros(of_sums, x.dtype());
    if columns == 0 || rows == 0 {
        return sums;
    }
    let x = x.storage::<bf16>();
    let matrices = sums.storage_mut::<bf16>().par_chunks_mut(columns);
    matrices.enumerate().for_each(|(matrix, sums)| {
        let x = &x[matrix * rows * columns..][..rows * columns];
        let parts = sums.par_chunks_mut(COLUMNS).enumerate();
        parts.for_each(|(part, sums)| {
            let mut floats = [0.0; COLUMNS];
            let floats = &mut floats[..sums.len()];
            vectorized(Add {
                x,
                columns,
                first: part * COLUMNS,
                sums: floats,
            });
            narrow(floats, sums);
        });
    });
    sums
}

struct Add<'a> {
    x: &'a [bf16],
    columns: usize,
    first: usize,
    sums: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for row in self.x.chunks_exact(self.columns) {
            let row = &row[self.first..self.first + self.sums.len()];
            for (sum, x) in self.sums.iter_mut().zip(row) {
                *sum += widened(*x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;

    #[test]
    fn sums_have_burns_bits() {
        for (shape, dim) in [
            (&[70, 1030][..], 0),
            (&[3, 41, 7], 1),
            (&[2, 5, 3, 4], 0),
            (&[5, 6], 1),
            (&[1, 9], 0),
        ] {
            let len = shape.iter().product();
            let value = |at: usize| ((at * 7919 % 1013) as f32 - 506.0) / 97.0;
            let values: Vec<bf16> = (0..len).map(|at| bf16::from_f32(value(at))).collect();
            let x = FlexTensor::from_data(TensorData::new(values, shape.to_vec()));
            let expected = Flex::float_sum_dim(x.clone(), dim);
            let found = sum_dim(x, dim);
            assert_eq!(found.layout().shape(), expected.layout().shape());
            let halves = |tensor: FlexTensor| tensor.into_data().try_to_vec::<bf16>();
            assert_eq!(
                halves(found).expect("halves"),
                halves(expected).expect("halves")
            );
        }
    }
}
