//! Matrix products and convolutions, without rounding.

use super::field::{Element, add, mul, reduce};
use super::tensor::Tensor;

/// Number of products, each below 2^122, that are added before a reduction by the modulus.
const UNREDUCED: usize = 32;

/// Returns the products of the matrices in the last two dims, with the other dims broadcast.
pub(super) fn matmul(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor, String> {
    let dims = |tensor: &Tensor| match tensor.shape.as_slice() {
        [batch @ .., rows, columns] => Ok((batch.len(), *rows, *columns)),
        shape => Err(format!("{shape:?} is not a matrix")),
    };
    let ((_, m, k), (_, other, n)) = (dims(a)?, dims(b)?);
    let batch = shape.len().checked_sub(2).map(|end| &shape[..end]);
    let Some(batch) = batch.filter(|_| k == other) else {
        return Err(format!("{:?} times {:?}", a.shape, b.shape));
    };
    let with = |rows, columns| -> Vec<usize> {
        let matrix = [rows, columns];
        batch.iter().copied().chain(matrix).collect()
    };
    let (a, b) = (a.expanded(&with(m, k))?, b.expanded(&with(k, n))?);
    let num_matrices: usize = batch.iter().product();
    let mut elements = Vec::with_capacity(num_matrices * m * n);
    let mut row = vec![0u128; n];
    for matrix in 0..num_matrices {
        let (a, b) = (&a.elements[matrix * m * k..], &b.elements[matrix * k * n..]);
        for i in 0..m {
            row.fill(0);
            for (added, j) in (0..k).enumerate() {
                if added % UNREDUCED == UNREDUCED - 1 {
                    row.iter_mut()
                        .for_each(|sum| *sum = u128::from(reduce(*sum)));
                }
                let factor = u128::from(a[i * k + j]);
                let of_b = &b[j * n..][..n];
                for (sum, element) in row.iter_mut().zip(of_b) {
                    *sum += factor * u128::from(*element);
                }
            }
            elements.extend(row.iter().map(|sum| reduce(*sum)));
        }
    }
    let tensor = Tensor::new(with(m, n), elements);
    tensor.reshaped(shape)
}

/// Returns the tensor as one matrix: all dims but the last are rows.
pub(super) fn as_matrix(tensor: &Tensor) -> Result<Tensor, String> {
    let width = tensor.shape.last().copied().unwrap_or(1);
    tensor.reshaped(&[tensor.len() / width.max(1), width])
}

/// Returns the transposed matrix.
pub(super) fn transposed<E: Copy>(matrix: &Tensor<E>) -> Tensor<E> {
    let last = matrix.shape.len() - 1;
    matrix.taken(&matrix.view().swapped(last - 1, last))
}

/// The geometry of a convolution over any number of dims: `x` is `[batch, channels, ..]`, the weight
/// `[channels out, channels / groups, ..]`.
#[derive(Debug, Clone)]
pub(super) struct Convolution<'a> {
    pub(super) x: &'a [usize],
    pub(super) weight: &'a [usize],
    pub(super) y: &'a [usize],
    pub(super) stride: Vec<usize>,
    /// Number of padding elements before the first element of each dim.
    pub(super) padding: Vec<usize>,
    pub(super) dilation: Vec<usize>,
    pub(super) groups: usize,
}

/// The flat indices of a product's factors, and of the result to which it is added.
pub(super) struct Product {
    pub(super) x: usize,
    pub(super) weight: usize,
    pub(super) y: usize,
}

impl Convolution<'_> {
    /// Calls `visit` for every product in the convolution.
    pub(super) fn visit(&self, mut visit: impl FnMut(Product)) {
        let (channels, channels_out) = (self.x[1], self.y[1]);
        let per_group = channels / self.groups.max(1);
        let out_per_group = (channels_out / self.groups.max(1)).max(1);
        let [x_len, y_len, kernel_len] =
            [self.x, self.y, self.weight].map(|shape| shape[2..].iter().product::<usize>());
        let windows = self.windows();
        for batch in 0..self.x[0] {
            for out in 0..channels_out {
                let first = out / out_per_group * per_group;
                for channel in 0..per_group {
                    let x = (batch * channels + first + channel) * x_len;
                    let y = (batch * channels_out + out) * y_len;
                    let weight = (out * per_group + channel) * kernel_len;
                    for (at_x, at_kernel, at_y) in &windows {
                        visit(Product {
                            x: x + at_x,
                            weight: weight + at_kernel,
                            y: y + at_y,
                        });
                    }
                }
            }
        }
    }

    /// Returns the flat indices in `x`, kernel and `y` of each product within one channel.
    fn windows(&self) -> Vec<(usize, usize, usize)> {
        let mut windows = vec![(0, 0, 0)];
        for dim in 0..self.stride.len() {
            let [x, kernel, y] =
                [self.x, self.weight, self.y].map(|shape| shape[2..].get(dim).copied());
            let (x, kernel, y) = (x.unwrap_or(1), kernel.unwrap_or(1), y.unwrap_or(1));
            let mut next = Vec::new();
            for (at_x, at_kernel, at_y) in windows {
                for out in 0..y {
                    for tap in 0..kernel {
                        let padded = out * self.stride[dim] + tap * self.dilation[dim];
                        let index = padded.checked_sub(self.padding[dim]);
                        if let Some(index) = index.filter(|index| *index < x) {
                            let places = (at_x * x + index, at_kernel * kernel + tap);
                            next.push((places.0, places.1, at_y * y + out));
                        }
                    }
                }
            }
            windows = next;
        }
        windows
    }
}

/// Adds the product of two elements to a third.
pub(super) fn accumulate(sum: &mut Element, a: Element, b: Element) {
    *sum = add(*sum, mul(a, b));
}
