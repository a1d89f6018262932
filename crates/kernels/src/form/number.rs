//! The numbers of composed forms.

use burn_ir::ScalarIr;

use super::array::Array;
use crate::pointwise::PointwiseOperation;

/// A scalar of a call.
#[derive(Debug, Clone, Copy)]
pub enum FormScalar<N> {
    /// A number that is the same in every step.
    Number(ScalarIr),
    /// A number that changes from step to step.
    Unknown(N),
}

/// A number with the arithmetic of floats.
pub trait Number: Copy + Default {
    /// One. The default is zero.
    const ONE: Self;

    /// Adds.
    fn add(self, other: Self) -> Self;
    /// Subtracts.
    fn sub(self, other: Self) -> Self;
    /// Multiplies.
    fn mul(self, other: Self) -> Self;
    /// Returns the reciprocal.
    fn inverse(self) -> Self;
    /// Returns true for a number above the other.
    fn is_above(self, other: Self) -> bool;
    /// Converts an integer.
    fn of_integer(value: i64) -> Self;
    /// Converts a scalar of a call.
    fn of_scalar(scalar: FormScalar<Self>) -> Self;
    /// Converts an element of an integer tensor to an index.
    fn index(self) -> usize;
    /// Applies the named function to a number.
    fn function(name: &str, argument: Self) -> Self;
    /// Returns the result of a step of a fused program. Each operand is a number, paired with the scalar that it comes
    /// from, if any.
    fn step(
        operation: PointwiseOperation,
        first: (Self, Option<FormScalar<Self>>),
        second: (Self, Option<FormScalar<Self>>),
    ) -> Self;
    /// Returns the batched product of the matrices in the last two dims.
    fn matmul(a: &Array<Self>, b: &Array<Self>, shape: &[usize]) -> Result<Array<Self>, String>;
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

    fn of_scalar(scalar: FormScalar<Self>) -> Self {
        match scalar {
            FormScalar::Number(scalar) => scalar.elem(),
            FormScalar::Unknown(number) => number,
        }
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
        (a, _): (Self, Option<FormScalar<Self>>),
        (b, _): (Self, Option<FormScalar<Self>>),
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

    fn matmul(a: &Array<Self>, b: &Array<Self>, shape: &[usize]) -> Result<Array<Self>, String> {
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
        Ok(Array::new(shape, elements))
    }
}
