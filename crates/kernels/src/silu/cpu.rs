//! SiLU and SwiGLU, with their gradients.

use burn::tensor::{DType, bf16};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::exp::exp_or_zero;
use crate::halves::{Elements, narrow, widen, zeros};
use crate::rows::{RowKernel, contiguous, map_rows};
use crate::vectors::{Kernel, vectorized};

/// Number of elements that a thread processes at a time if there are more than two operands.
const CHUNK: usize = 1 << 12;

/// Returns `x` times its sigmoid.
pub(crate) fn forward(x: FlexTensor) -> FlexTensor {
    let mut x = contiguous(x);
    map_rows(&mut x, None, &Forward);
    x
}

/// Returns the gradient of [`forward`]'s input, in the memory of the output's gradient.
pub(crate) fn backward(x: FlexTensor, grad: FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let mut grad = contiguous(grad);
    map_rows(&mut grad, Some(Elements::of(&x)), &Gradient);
    grad
}

/// Returns the values times the SiLU of a gate of the same shape, in the memory of the gate.
pub(crate) fn gated(gate: FlexTensor, values: FlexTensor) -> FlexTensor {
    let mut gate = contiguous(gate);
    let values = contiguous(values);
    map_rows(&mut gate, Some(Elements::of(&values)), &Gated);
    gate
}

/// Returns the gradients of gate and values of [`gated`]. The first reuses the memory of the result's gradient.
pub(crate) fn gated_gradients(
    gate: FlexTensor,
    values: FlexTensor,
    grad: FlexTensor,
) -> [FlexTensor; 2] {
    let (gate, values) = (contiguous(gate), contiguous(values));
    let mut of_gate = contiguous(grad);
    let dtype = of_gate.dtype();
    let mut of_values = zeros(of_gate.layout().shape().clone(), dtype);
    let operands = [&gate, &values].map(Elements::of);
    // The gradient of the result becomes the gradient of the gate.
    let run =
        |number: usize, grad: &mut [f32], of_values: &mut [f32], buffers: &mut [Vec<f32>; 2]| {
            let range = number * CHUNK..number * CHUNK + grad.len();
            let [first, second] = buffers;
            vectorized(GatedGradient {
                gate: operands[0].part(range.clone(), first),
                values: operands[1].part(range, second),
                grad,
                of_values,
            });
        };
    if dtype == DType::BF16 {
        let chunks = of_gate.storage_mut::<bf16>().par_chunks_mut(CHUNK);
        let chunks = chunks.zip(of_values.storage_mut::<bf16>().par_chunks_mut(CHUNK));
        chunks.enumerate().for_each_init(
            Default::default,
            |(grads, others, buffers): &mut (Vec<f32>, Vec<f32>, _), (number, (grad, other))| {
                let grads = widen(grad, grads);
                let others = widen(other, others);
                run(number, grads, others, buffers);
                narrow(grads, grad);
                narrow(others, other);
            },
        );
    } else {
        let chunks = of_gate.storage_mut::<f32>().par_chunks_mut(CHUNK);
        let chunks = chunks.zip(of_values.storage_mut::<f32>().par_chunks_mut(CHUNK));
        chunks.enumerate().for_each_init(
            Default::default,
            |buffers, (number, (grad, of_values))| {
                run(number, grad, of_values, buffers);
            },
        );
    }
    [of_gate, of_values]
}

struct Forward;

impl RowKernel for Forward {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], _: &[f32]) {
        for x in rows {
            *x *= sigmoid(*x);
        }
    }
}

/// Turns the gradient of the output into the gradient of the input. The second matrix is the input.
struct Gradient;

impl RowKernel for Gradient {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, grad: &mut [f32], x: &[f32]) {
        for (grad, &x) in grad.iter_mut().zip(x) {
            *grad = gradient(x, sigmoid(x), *grad);
        }
    }
}

/// Turns the gate into the result. The second matrix contains the values.
struct Gated;

impl RowKernel for Gated {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, gate: &mut [f32], values: &[f32]) {
        for (x, value) in gate.iter_mut().zip(values) {
            *x = *x * sigmoid(*x) * value;
        }
    }
}

/// Turns the gradient of the result into the gradient of the gate, and writes the gradient of the values.
struct GatedGradient<'a> {
    gate: &'a [f32],
    values: &'a [f32],
    grad: &'a mut [f32],
    of_values: &'a mut [f32],
}

impl Kernel for GatedGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let operands = self.gate.iter().zip(self.values);
        let results = self.grad.iter_mut().zip(self.of_values);
        for ((&x, &value), (grad, of_value)) in operands.zip(results) {
            let sigmoid = sigmoid(x);
            *of_value = *grad * (x * sigmoid);
            *grad = gradient(x, sigmoid, *grad * value);
        }
    }
}

/// Returns the gradient of `x` from the gradient of its SiLU. It is the sum of two parts, as in the composed operation,
/// so it is NaN if either part is.
#[inline(always)]
fn gradient(x: f32, sigmoid: f32, grad: f32) -> f32 {
    grad * sigmoid + grad * x * sigmoid * (1.0 - sigmoid)
}

/// Returns `1 / (1 + exp(-x))`.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let exp = exp_or_zero(-x.abs());
    let above = if x >= 0.0 { 1.0 } else { exp };
    above / (1.0 + exp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sigmoid_matches_64_bits() {
        for step in -400_000..400_000 {
            let x = step as f32 * 3e-4;
            let expected = 1.0 / (1.0 + (-f64::from(x)).exp());
            let difference = (f64::from(sigmoid(x)) - expected).abs();
            assert!(difference < 3e-7 * expected + 1e-37, "sigmoid({x})");
        }
    }

    #[test]
    fn the_sigmoid_of_the_extremes() {
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert!(sigmoid(f32::NAN).is_nan());
    }
}
