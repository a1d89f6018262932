//! GELU and its gradient on Burn's CPU backend.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use burn_flex::FlexTensor;

use crate::exp::exp_or_zero;
use crate::halves::Elements;
use crate::rows::{RowKernel, contiguous, map_rows};

pub(crate) fn forward(x: FlexTensor) -> FlexTensor {
    let mut x = contiguous(x);
    map_rows(&mut x, None, &Forward);
    x
}

pub(crate) fn backward(x: FlexTensor, grad: FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let mut grad = contiguous(grad);
    map_rows(&mut grad, Some(Elements::of(&x)), &Gradient);
    grad
}

struct Forward;

impl RowKernel for Forward {
    type Output = ();

    #[inline(always)]
    fn run(&self, _: usize, rows: &mut [f32], _: &[f32]) {
        for x in rows {
            *x *= Normal::at(*x).cumulative;
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
            let normal = Normal::at(x);
            *grad *= normal.cumulative + x * normal.density;
        }
    }
}

/// The normal distribution at one point.
struct Normal {
    /// Probability of a value below this point.
    cumulative: f32,
    density: f32,
}

impl Normal {
    /// Computes the distribution by formula 7.1.26 of Abramowitz and Stegun, like PyTorch's vectorized `erf`. The error
    /// is at most 7.5e-8.
    #[inline(always)]
    fn at(x: f32) -> Self {
        let exp = exp_or_zero(-0.5 * x * x);
        let t = 1.0 / (1.0 + 0.327_591_1 * FRAC_1_SQRT_2 * x.abs());
        let mut series = 1.061_405_4;
        for coefficient in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
            series = series * t + coefficient;
        }
        let tail = 0.5 * series * t * exp;
        Self {
            cumulative: if x >= 0.0 { 1.0 - tail } else { tail },
            density: 0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI * exp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_density_of_zero_is_one_over_the_root_of_two_pi() {
        assert!((Normal::at(0.0).density - 0.398_942_3).abs() < 1e-7);
    }

    #[test]
    fn the_density_of_huge_values_is_zero() {
        // Even the product with a huge `x` is zero, so it does not change the gradient.
        for x in [20.0, 1e19, 1e35, 3e38] {
            assert_eq!(x * Normal::at(x).density, 0.0);
            assert_eq!(x * Normal::at(-x).cumulative, 0.0);
        }
    }

    #[test]
    fn the_distribution_has_known_values() {
        for (x, expected) in [
            (0.0, 0.5),
            (1.0, 0.841_344_7),
            (-1.0, 0.158_655_3),
            (2.5, 0.993_790_3),
            (-6.0, 0.0),
            (f32::INFINITY, 1.0),
        ] {
            let found = Normal::at(x).cumulative;
            assert!((found - expected).abs() < 2e-7, "{x}: {found}");
        }
        assert!(Normal::at(f32::NAN).cumulative.is_nan());
    }
}
