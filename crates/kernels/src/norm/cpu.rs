//! Layer norms and root mean square norms on Burn's CPU backend.

use burn_flex::FlexTensor;

use crate::halves::{Elements, floats, vector};
use crate::rows::{RowKernel, contiguous, map_rows, matrix_dims, sum_by, sum_pairs_by};

/// The normalization of a row before it is scaled.
#[derive(Clone, Copy)]
enum Form {
    /// Subtracts the mean, and divides by the standard deviation.
    Layer,
    /// Divides by the root mean square.
    RootMeanSquare,
}

/// Returns the layer norm of rows, scaled by gamma and shifted by beta.
pub(crate) fn forward(
    x: FlexTensor,
    gamma: FlexTensor,
    beta: FlexTensor,
    epsilon: f32,
) -> FlexTensor {
    scaled(x, gamma, Some(beta), (Form::Layer, epsilon))
}

/// Returns `row / sqrt(mean_square(row) + epsilon) * gamma` for each row.
pub(crate) fn root_mean_square(x: FlexTensor, gamma: FlexTensor, epsilon: f32) -> FlexTensor {
    scaled(x, gamma, None, (Form::RootMeanSquare, epsilon))
}

fn scaled(
    x: FlexTensor,
    gamma: FlexTensor,
    beta: Option<FlexTensor>,
    (form, epsilon): (Form, f32),
) -> FlexTensor {
    let (gamma, beta) = (contiguous(gamma), beta.map(contiguous));
    let beta = beta.as_ref().map(floats);
    // Writing to a shared input copies it, so no other copy is needed.
    let mut output = contiguous(x);
    let kernel = Forward {
        gamma: &floats(&gamma),
        beta: beta.as_deref(),
        form,
        epsilon,
    };
    map_rows(&mut output, None, &kernel);
    output
}

struct Forward<'a> {
    gamma: &'a [f32],
    beta: Option<&'a [f32]>,
    form: Form,
    epsilon: f32,
}

impl RowKernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], _: &[f32]) {
        for row in rows.chunks_exact_mut(self.gamma.len()) {
            let moments = Moments::of(row, self.form, self.epsilon);
            let scaled = row.iter_mut().zip(self.gamma);
            match self.beta {
                Some(beta) => {
                    for ((x, gamma), beta) in scaled.zip(beta) {
                        *x = moments.normalize(*x) * gamma + beta;
                    }
                }
                None => {
                    for (x, gamma) in scaled {
                        *x = moments.normalize(*x) * gamma;
                    }
                }
            }
        }
    }
}

/// Returns the gradients of input, gamma and beta of a layer norm.
pub(crate) fn backward(
    x: FlexTensor,
    gamma: FlexTensor,
    grad: FlexTensor,
    epsilon: f32,
) -> [FlexTensor; 3] {
    let dtype = gamma.dtype();
    let (of_x, sums) = gradients(x, gamma, grad, (Form::Layer, epsilon));
    let [of_gamma, of_beta] = [sums.gamma, sums.beta].map(|sum| vector(sum, dtype));
    [of_x, of_gamma, of_beta]
}

/// Returns the gradients of input and gamma of [`root_mean_square`].
pub(crate) fn root_mean_square_gradients(
    x: FlexTensor,
    gamma: FlexTensor,
    grad: FlexTensor,
    epsilon: f32,
) -> [FlexTensor; 2] {
    let dtype = gamma.dtype();
    let (of_x, sums) = gradients(x, gamma, grad, (Form::RootMeanSquare, epsilon));
    [of_x, vector(sums.gamma, dtype)]
}

/// Returns the gradient of the input, and the sums that are the gradients of gamma and beta.
fn gradients(
    x: FlexTensor,
    gamma: FlexTensor,
    grad: FlexTensor,
    (form, epsilon): (Form, f32),
) -> (FlexTensor, VectorSums) {
    let (x, gamma) = (contiguous(x), contiguous(gamma));
    let mut grad = contiguous(grad);
    let [_, width] = matrix_dims(&grad);
    let kernel = Gradient {
        gamma: &floats(&gamma),
        form,
        epsilon,
    };
    let sums = map_rows(&mut grad, Some(Elements::of(&x)), &kernel);
    let mut total = VectorSums::zeros(width, form);
    for sums in &sums {
        total.add(sums);
    }
    (grad, total)
}

/// Turns the gradient of the output into the gradient of the input. The second matrix is the input.
struct Gradient<'a> {
    gamma: &'a [f32],
    form: Form,
    epsilon: f32,
}

impl RowKernel for Gradient<'_> {
    type Output = VectorSums;

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], x: &[f32]) -> VectorSums {
        let width = self.gamma.len();
        let mut sums = VectorSums::zeros(width, self.form);
        let x = x.chunks_exact(width);
        for (grad, x) in rows.chunks_exact_mut(width).zip(x) {
            let moments = Moments::of(x, self.form, self.epsilon);
            sums.add_row(grad, x, moments);
            for (grad, gamma) in grad.iter_mut().zip(self.gamma) {
                *grad *= gamma;
            }
            let mean = match self.form {
                Form::Layer => sum_by(grad, |g| g) / width as f32,
                Form::RootMeanSquare => 0.0,
            };
            replace_row(grad, x, mean, moments);
        }
        sums
    }
}

/// Turns the gradient of a normalized row into the gradient of the row. `mean` is the mean of the gradient if the norm
/// subtracts the row's mean, and otherwise zero.
#[inline(always)]
fn replace_row(grad: &mut [f32], x: &[f32], mean: f32, moments: Moments) {
    let width = grad.len() as f32;
    let slope = sum_pairs_by(grad, x, |g, x| g * moments.normalize(x)) / width;
    for (grad, &x) in grad.iter_mut().zip(x) {
        *grad = (*grad - mean - slope * moments.normalize(x)) * moments.inverse_deviation;
    }
}

/// Mean and inverse standard deviation of a row, or zero and its inverse root mean square.
#[derive(Clone, Copy)]
struct Moments {
    mean: f32,
    inverse_deviation: f32,
}

impl Moments {
    #[inline(always)]
    fn of(row: &[f32], form: Form, epsilon: f32) -> Self {
        let width = row.len() as f32;
        let mean = match form {
            Form::Layer => sum_by(row, |x| x) / width,
            Form::RootMeanSquare => 0.0,
        };
        let variance = sum_by(row, |x| (x - mean) * (x - mean)) / width;
        Self {
            mean,
            inverse_deviation: 1.0 / (variance + epsilon).sqrt(),
        }
    }

    #[inline(always)]
    fn normalize(self, x: f32) -> f32 {
        (x - self.mean) * self.inverse_deviation
    }
}

/// Gradients of gamma and beta, summed over rows.
struct VectorSums {
    gamma: Vec<f32>,
    /// Empty for a norm without beta.
    beta: Vec<f32>,
}

impl VectorSums {
    fn zeros(width: usize, form: Form) -> Self {
        let beta = match form {
            Form::Layer => width,
            Form::RootMeanSquare => 0,
        };
        Self {
            gamma: vec![0.0; width],
            beta: vec![0.0; beta],
        }
    }

    #[inline(always)]
    fn add_row(&mut self, grad: &[f32], x: &[f32], moments: Moments) {
        for (gamma, (grad, &x)) in self.gamma.iter_mut().zip(grad.iter().zip(x)) {
            *gamma += grad * moments.normalize(x);
        }
        for (beta, grad) in self.beta.iter_mut().zip(grad) {
            *beta += grad;
        }
    }

    fn add(&mut self, other: &Self) {
        let sums = self.gamma.iter_mut().chain(&mut self.beta);
        for (sum, value) in sums.zip(other.gamma.iter().chain(&other.beta)) {
            *sum += value;
        }
    }
}
