//! Softmax and its logarithm over rows, with their gradients.

use burn_flex::FlexTensor;

use crate::exp::exp_or_zero;
use crate::halves::Elements;
use crate::rows::{RowKernel, contiguous, map_rows, matrix_dims, max, scale, sum_by, sum_pairs_by};

/// The function applied to rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// The probabilities.
    Plain,
    /// The logarithms of the probabilities.
    Log,
}

/// Applies `form` to each row, in the memory of `x`.
pub(crate) fn forward(x: FlexTensor, form: Form) -> FlexTensor {
    let mut x = contiguous(x);
    let [_, width] = matrix_dims(&x);
    map_rows(&mut x, None, &Forward { width, form });
    x
}

struct Forward {
    width: usize,
    form: Form,
}

impl RowKernel for Forward {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], _: &[f32]) {
        for row in rows.chunks_exact_mut(self.width) {
            let max = max(row);
            match self.form {
                Form::Plain => {
                    for x in &mut *row {
                        *x = exp_or_zero(*x - max);
                    }
                    let sum = sum_by(row, |x| x);
                    scale(row, 1.0 / sum);
                }
                Form::Log => {
                    let sum = sum_by(row, |x| exp_or_zero(x - max));
                    let log = sum.ln();
                    for x in row {
                        *x = (*x - max) - log;
                    }
                }
            }
        }
    }
}

/// Returns the gradient of the input, in the memory of the gradient of the output `y`.
pub(crate) fn backward(y: FlexTensor, grad: FlexTensor, form: Form) -> FlexTensor {
    let y = contiguous(y);
    let mut grad = contiguous(grad);
    let [_, width] = matrix_dims(&grad);
    map_rows(&mut grad, Some(Elements::of(&y)), &Gradient { width, form });
    grad
}

/// Turns the gradient of the output into the gradient of the input. The second matrix is the output.
struct Gradient {
    width: usize,
    form: Form,
}

impl RowKernel for Gradient {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], y: &[f32]) {
        let y = y.chunks_exact(self.width);
        for (grad, y) in rows.chunks_exact_mut(self.width).zip(y) {
            match self.form {
                Form::Plain => {
                    let mean = sum_pairs_by(grad, y, |grad, y| grad * y);
                    for (grad, &y) in grad.iter_mut().zip(y) {
                        *grad = (*grad - mean) * y;
                    }
                }
                Form::Log => {
                    let sum = sum_by(grad, |grad| grad);
                    for (grad, &y) in grad.iter_mut().zip(y) {
                        *grad -= exp_or_zero(y) * sum;
                    }
                }
            }
        }
    }
}
