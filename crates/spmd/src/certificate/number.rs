//! The number types of kernels' composed forms: elements of the field, and 64-bit floats.

use burn_fsdp_kernels::PointwiseOperation;

use super::field::{self, Element};
use super::pointwise::{self, Operand};
use super::products;
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor};

/// A number with the arithmetic of floats.
pub(super) trait Number: Copy + Default {
    const ONE: Self;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn inverse(self) -> Self;
    fn is_above(self, other: Self) -> bool;
    fn of_integer(value: i64) -> Self;
    fn of_scalar(scalar: Scalar) -> Self;
    /// Converts an element of an integer tensor to an index.
    fn index(self) -> usize;
    /// Applies the named function to a number.
    fn function(name: &str, argument: Self) -> Self;
    /// Returns the result of a step of a fused program. Each operand is a number, paired with the scalar that it comes
    /// from, if any.
    fn step(
        operation: PointwiseOperation,
        first: (Self, Option<Scalar>),
        second: (Self, Option<Scalar>),
    ) -> Self;
    /// Returns the batched product of the matrices in the last two dims.
    fn matmul(a: &Tensor<Self>, b: &Tensor<Self>, shape: &[usize]) -> Result<Tensor<Self>, String>;
}

impl Number for Element {
    const ONE: Self = 1;

    fn add(self, other: Self) -> Self {
        field::add(self, other)
    }

    fn sub(self, other: Self) -> Self {
        field::sub(self, other)
    }

    fn mul(self, other: Self) -> Self {
        field::mul(self, other)
    }

    fn inverse(self) -> Self {
        field::inverse(self)
    }

    fn is_above(self, other: Self) -> bool {
        field::order(self) > field::order(other)
    }

    fn of_integer(value: i64) -> Self {
        field::of_integer(value)
    }

    fn of_scalar(scalar: Scalar) -> Self {
        scalar.element(Kind::Float)
    }

    fn index(self) -> usize {
        self as usize
    }

    fn function(name: &str, argument: Self) -> Self {
        field::function(name, &[argument])
    }

    fn step(operation: PointwiseOperation, first: Operand, second: Operand) -> Self {
        pointwise::step(operation, first, second)
    }

    fn matmul(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor, String> {
        products::matmul(a, b, shape)
    }
}

impl Number for f64 {
    const ONE: Self = 1.0;

    fn add(self, other: Self) -> Self {
        self + other
    }

    fn sub(self, other: Self) -> Self {
        self - other
    }

    fn mul(self, other: Self) -> Self {
        self * other
    }

    fn inverse(self) -> Self {
        1.0 / self
    }

    fn is_above(self, other: Self) -> bool {
        self > other
    }

    fn of_integer(value: i64) -> Self {
        value as f64
    }

    fn of_scalar(scalar: Scalar) -> Self {
        scalar.number().unwrap_or(f64::NAN)
    }

    fn index(self) -> usize {
        self as usize
    }

    fn function(name: &str, argument: Self) -> Self {
        let x = argument;
        let normal = || 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2));
        match name {
            "exp" => x.exp(),
            "log" => x.ln(),
            "sqrt" => x.sqrt(),
            "sigmoid" => 1.0 / (1.0 + (-x).exp()),
            "gelu" => x * normal(),
            "gelu gradient" => {
                let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
                normal() + x * density
            }
            // An unknown function fails every comparison.
            _ => f64::NAN,
        }
    }

    fn step(
        operation: PointwiseOperation,
        (a, _): (Self, Option<Scalar>),
        (b, _): (Self, Option<Scalar>),
    ) -> Self {
        use PointwiseOperation as Op;
        match operation {
            Op::Add => a + b,
            Op::Sub => a - b,
            Op::Mul => a * b,
            Op::Div => a / b,
            Op::Powf => a.powf(b),
            Op::Neg => -a,
            Op::Abs => a.abs(),
            Op::Recip => 1.0 / a,
            Op::Sqrt => a.sqrt(),
            Op::Exp => a.exp(),
            Op::Log => a.ln(),
            Op::Tanh => a.tanh(),
            Op::Relu => a.max(0.0),
            Op::ReluBackward if a > 0.0 => b,
            Op::ReluBackward => 0.0,
            Op::Sigmoid => 1.0 / (1.0 + (-a).exp()),
            Op::SigmoidBackward => b * a * (1.0 - a),
        }
    }

    fn matmul(a: &Tensor<Self>, b: &Tensor<Self>, shape: &[usize]) -> Result<Tensor<Self>, String> {
        let (Some([m, k]), Some([other, n])) = (a.shape.last_chunk(), b.shape.last_chunk()) else {
            return Err(format!("{:?} and {:?} are not matrices", a.shape, b.shape));
        };
        let batch = shape.len().checked_sub(2).map(|end| &shape[..end]);
        let Some(batch) = batch.filter(|_| k == other) else {
            return Err(format!("{:?} times {:?}", a.shape, b.shape));
        };
        let with = |matrix: [usize; 2]| [batch, &matrix].concat();
        let (a, b) = (a.expanded(&with([*m, *k]))?, b.expanded(&with([*k, *n]))?);
        let num_matrices: usize = batch.iter().product();
        let mut elements = Vec::with_capacity(num_matrices * m * n);
        for matrix in 0..num_matrices {
            let (a, b) = (&a.elements[matrix * m * k..], &b.elements[matrix * k * n..]);
            for row in 0..*m {
                for column in 0..*n {
                    let factors = (0..*k).map(|at| a[row * k + at] * b[at * n + column]);
                    elements.push(factors.sum());
                }
            }
        }
        Ok(Tensor::new(shape, elements))
    }
}
