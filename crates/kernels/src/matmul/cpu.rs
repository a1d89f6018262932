//! Matrix products.
//!
//! Burn's CPU backend fills the memory of a result with zeros, copies it to aligned memory, and writes the product
//! there. In `bf16`, it first converts the operands to 32-bit copies, element by element. In 32 bits, this module calls
//! the same library, but writes a product only once, with the same bits. In `bf16`, it sums in 32 bits and rounds once.
//! Processors with fast `bf16` instructions multiply directly. Others widen a part of each factor at a time and multiply
//! in 32 bits.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Bytes, DType, Shape, bf16};
use burn_flex::{FlexTensor, Layout};

use crate::matrix::Matrix;
use crate::product::{Factor, add_products, products};

/// Returns the product of the last two dims of two tensors. The other dims are broadcast.
///
/// # Panics
///
/// Like Burn: if the types differ, or the sizes do not match.
pub(crate) fn matmul(lhs: FlexTensor, rhs: FlexTensor) -> FlexTensor {
    let is_forward = |tensor: &FlexTensor| tensor.layout().has_positive_strides();
    match (lhs.dtype(), rhs.dtype()) {
        (DType::F32, DType::F32) if is_forward(&lhs) && is_forward(&rhs) => {
            of_type::<f32>(&lhs, &rhs)
        }
        (DType::BF16, DType::BF16) => {
            let [lhs, rhs] = [lhs, rhs].map(|tensor| {
                if is_forward(&tensor) {
                    tensor
                } else {
                    tensor.to_contiguous()
                }
            });
            of_type::<bf16>(&lhs, &rhs)
        }
        // Burn multiplies flipped tensors in a different order.
        _ => Flex::float_matmul(lhs, rhs),
    }
}

/// Returns the product of tensors without negative strides.
fn of_type<T: Factor>(lhs: &FlexTensor, rhs: &FlexTensor) -> FlexTensor {
    let (left, right) = (Batch::<T>::of(lhs), Batch::of(rhs));
    assert_eq!(left.width, right.height, "the inner sizes must be equal");
    let shape = shape_of(lhs, rhs);
    let batch = &shape.as_slice()[..shape.num_dims() - 2];
    let num_products = batch.iter().product();
    let elements = products(num_products, [left.height, right.width], |index| {
        (left.matrix(index, batch), right.matrix(index, batch))
    });
    let bytes = Bytes::from_elems(elements);
    FlexTensor::new(bytes, Layout::contiguous(shape), T::dtype())
}

/// Adds the products of two batches of 32-bit matrices, `[n, rows, ..]` and `[n, .., columns]`, to a matrix whose rows
/// have length `row_len`. The products are in separate columns, side by side from column `first`.
///
/// # Panics
///
/// If the sizes do not match, or the columns are out of range.
pub(crate) fn add_matmul(
    lhs: FlexTensor,
    rhs: FlexTensor,
    into: &mut [f32],
    [row_len, first]: [usize; 2],
) {
    let [lhs, rhs] = [lhs, rhs].map(|tensor| {
        if tensor.layout().has_positive_strides() {
            tensor
        } else {
            tensor.to_contiguous()
        }
    });
    let (left, right) = (Batch::<f32>::of(&lhs), Batch::of(&rhs));
    let batch = [lhs.layout().shape()[0]];
    let factors = |index| (left.matrix(index, &batch), right.matrix(index, &batch));
    let sizes = [left.height, right.width];
    add_products(batch[0], sizes, factors, into, [row_len, first]);
}

/// Returns the shape of a product.
fn shape_of(lhs: &FlexTensor, rhs: &FlexTensor) -> Shape {
    let [lhs, rhs] = [lhs, rhs].map(|tensor| tensor.layout().shape());
    let rank = lhs.num_dims().max(rhs.num_dims());
    let dim = |shape: &Shape, dim: usize| match (dim + shape.num_dims()).checked_sub(rank) {
        Some(dim) => shape[dim],
        None => 1,
    };
    let batch = (0..rank - 2).map(|at| {
        let [a, b] = [dim(lhs, at), dim(rhs, at)];
        assert!(
            a == b || a == 1 || b == 1,
            "shapes {lhs:?} and {rhs:?} do not broadcast"
        );
        if a == 1 { b } else { a }
    });
    let matrix = [lhs[lhs.num_dims() - 2], rhs[rhs.num_dims() - 1]];
    Shape::from(batch.chain(matrix).collect::<Vec<_>>())
}

/// The matrices in the last two dims of a tensor.
struct Batch<'a, T> {
    elements: &'a [T],
    /// Sizes and strides of the other dims.
    dims: Vec<[usize; 2]>,
    height: usize,
    width: usize,
    strides: [usize; 2],
}

impl<'a, T: Factor> Batch<'a, T> {
    fn of(tensor: &'a FlexTensor) -> Self {
        let layout = tensor.layout();
        let shape = layout.shape();
        let rank = shape.num_dims();
        assert!(rank >= 2, "shape {shape:?} is not a matrix");
        let strides: Vec<usize> = layout.strides().iter().map(|of| *of as usize).collect();
        let dims = (0..rank - 2).map(|dim| [shape[dim], strides[dim]]);
        Self {
            elements: &tensor.storage()[layout.start_offset()..],
            dims: dims.collect(),
            height: shape[rank - 2],
            width: shape[rank - 1],
            strides: [strides[rank - 2], strides[rank - 1]],
        }
    }

    /// Returns the matrix that belongs to product `index` of a batch of products.
    fn matrix(&self, index: usize, batch: &[usize]) -> Matrix<'a, T> {
        let mut rest = index;
        let mut offset = 0;
        let mut dims = self.dims.iter().rev();
        for size in batch.iter().rev() {
            let at = rest % size;
            rest /= size;
            match dims.next() {
                Some([own, stride]) if *own > 1 => offset += at * stride,
                _ => {}
            }
        }
        let sizes = [self.height, self.width];
        Matrix::new(&self.elements[offset..], sizes, self.strides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    fn tensor(shape: &[usize], seed: usize) -> FlexTensor {
        let len = shape.iter().product();
        let value = |at: usize| (((at + seed) * 7919 % 1013) as f32 - 506.0) / 307.0;
        let values: Vec<bf16> = (0..len).map(|at| bf16::from_f32(value(at))).collect();
        FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
    }

    fn in_64_bits(tensor: &FlexTensor) -> FlexTensor {
        let data = tensor.to_contiguous().into_data();
        FlexTensor::from_data(data.convert_dtype(DType::F64))
    }

    /// Compares a product with the product in 64 bits: it must equal the rounded value or a neighbouring number.
    #[track_caller]
    fn assert_product(lhs: FlexTensor, rhs: FlexTensor) {
        let exact = Flex::float_matmul(in_64_bits(&lhs), in_64_bits(&rhs));
        let found = matmul(lhs, rhs);
        assert_eq!(found.layout().shape(), exact.layout().shape());
        let found: Vec<bf16> = found.into_data().try_to_vec().expect("halves");
        let exact: Vec<f64> = exact.into_data().try_to_vec().expect("64-bit floats");
        for (found, exact) in found.into_iter().zip(exact) {
            let difference = (found.to_f64() - exact).abs();
            assert!(
                difference <= exact.abs() / 240.0 + 1e-5,
                "{found} is not {exact}"
            );
        }
    }

    #[test]
    fn products_of_any_shape_match_64_bits() {
        for [m, k, n] in [
            [1, 1, 1],
            [3, 5, 7],
            [64, 64, 64],
            [130, 1000, 33],
            [257, 384, 129],
            [5, 0, 3],
            [0, 4, 3],
            [300, 31, 300],
        ] {
            assert_product(tensor(&[m, k], 1), tensor(&[k, n], 2));
            assert_product(tensor(&[k, m], 3).transpose(0, 1), tensor(&[k, n], 4));
            assert_product(tensor(&[m, k], 5), tensor(&[n, k], 6).transpose(0, 1));
        }
    }

    /// Covers every kind of shape that Burn handles separately: small and large, single and batched.
    #[test]
    fn products_in_32_bits_match_burn_bit_for_bit() {
        let floats = |shape: &[usize], seed| {
            let data = tensor(shape, seed).into_data();
            FlexTensor::from_data(data.convert_dtype(DType::F32))
        };
        let bits = |tensor: FlexTensor| -> Vec<u32> {
            let values = tensor
                .into_data()
                .try_to_vec::<f32>()
                .expect("32-bit floats");
            values.into_iter().map(f32::to_bits).collect()
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        pool.expect("a pool can be built").install(|| {
            for (lhs, rhs) in [
                (&[5, 7][..], &[7, 3][..]),
                (&[300, 200], &[200, 250]),
                (&[2, 200, 200], &[2, 200, 200]),
                (&[5, 64, 130], &[5, 130, 65]),
                (&[2, 3, 5, 7], &[3, 7, 4]),
                (&[4, 0], &[0, 3]),
                (&[3, 40, 30], &[30, 20]),
                // Columns of a transposed factor that share cache sets.
                (&[130, 256], &[256, 200]),
                (&[200, 768], &[768, 129]),
                (&[128, 4096], &[4096, 383]),
                (&[3, 150, 512], &[3, 512, 47]),
                // Few enough columns for the library to add in a different order.
                (&[128, 256], &[256, 2]),
                (&[130, 256], &[256, 16]),
            ] {
                let (lhs, rhs) = (floats(lhs, 1), floats(rhs, 2));
                let expected = Flex::float_matmul(lhs.clone(), rhs.clone());
                assert_eq!(bits(matmul(lhs.clone(), rhs.clone())), bits(expected));
                let rank = lhs.layout().num_dims();
                let turned = floats(lhs.transpose(rank - 2, rank - 1).layout().shape(), 3);
                let turned = turned.transpose(rank - 2, rank - 1);
                let expected = Flex::float_matmul(turned.clone(), rhs.clone());
                assert_eq!(bits(matmul(turned, rhs.clone())), bits(expected));
                let rank = rhs.layout().num_dims();
                let turned = floats(rhs.transpose(rank - 2, rank - 1).layout().shape(), 4);
                let turned = turned.transpose(rank - 2, rank - 1);
                let expected = Flex::float_matmul(lhs.clone(), turned.clone());
                assert_eq!(bits(matmul(lhs, turned)), bits(expected));
            }
            // A view of some columns of such a factor. The length of its rows is not a multiple of a cache line.
            let lhs = floats(&[150, 250], 5);
            let turned = floats(&[200, 256], 6).narrow(1, 3, 250).transpose(0, 1);
            let expected = Flex::float_matmul(lhs.clone(), turned.clone());
            assert_eq!(bits(matmul(lhs, turned)), bits(expected));
        });
    }

    #[test]
    fn other_dims_are_broadcast() {
        for (lhs, rhs) in [
            (&[2, 3, 5, 7][..], &[2, 3, 7, 4][..]),
            (&[2, 1, 5, 7], &[3, 7, 4]),
            (&[3, 5, 7], &[7, 4]),
            (&[1, 5, 7], &[6, 7, 4]),
        ] {
            assert_product(tensor(lhs, 1), tensor(rhs, 2));
        }
        // Burn broadcasts the batch of one here.
        let nothing = matmul(tensor(&[0, 5, 7], 1), tensor(&[1, 7, 4], 2));
        assert_eq!(nothing.layout().shape().as_slice(), [0, 5, 4]);
        let heads = tensor(&[2, 9, 3, 8], 7).permute(&[0, 2, 1, 3]);
        let part = tensor(&[2, 3, 12, 11], 8).narrow(2, 4, 8).narrow(3, 1, 6);
        assert_product(heads, part);
    }

    #[test]
    fn nan_and_infinities_propagate() {
        let values = |number: f32| vec![bf16::from_f32(number); 4];
        for number in [f32::NAN, f32::INFINITY] {
            let lhs = FlexTensor::from_data(TensorData::new(values(number), [1, 4]));
            let rhs = FlexTensor::from_data(TensorData::new(values(1.0), [4, 1]));
            let found: Vec<bf16> = matmul(lhs, rhs).into_data().try_to_vec().expect("halves");
            assert_eq!(found[0].is_nan(), number.is_nan());
            assert_eq!(found[0].is_infinite(), number.is_infinite());
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let products = || {
                // Some row counts leave a part with few rows.
                [500, 257, 65, 48].map(|rows| {
                    let product = matmul(tensor(&[rows, 384], 1), tensor(&[384, 200], 2));
                    product.into_data().try_to_vec::<bf16>().expect("halves")
                })
            };
            pool.expect("a pool can be built").install(products)
        };
        for threads in [2, 3, 8] {
            assert_eq!(run(1), run(threads), "{threads}");
        }
    }
}
