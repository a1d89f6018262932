//! Elementwise operations, with broadcasting.

use burn_fsdp_kernels::PointwiseOperation;

use super::field::{Element, add, div, function, inverse, mul, neg, order, power, sub};
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor};

/// Applies `of` to the operands' elements at each position, after broadcasting.
pub(super) fn map<E: Copy + Default>(
    shape: &[usize],
    operands: &[&Tensor<E>],
    mut of: impl FnMut(&[E]) -> E,
) -> Result<Tensor<E>, String> {
    let operands = operands.iter().map(|operand| operand.expanded(shape));
    let operands = operands.collect::<Result<Vec<_>, _>>()?;
    let mut arguments = vec![E::default(); operands.len()];
    Ok(Tensor::from_fn(shape, |index| {
        for (argument, operand) in arguments.iter_mut().zip(&operands) {
            *argument = operand.elements[index];
        }
        of(&arguments)
    }))
}

/// A binary arithmetic operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
}

impl Arithmetic {
    pub(super) fn of(self, kind: Kind, a: Element, b: Element) -> Element {
        match (kind, self) {
            (Kind::Float, Self::Add) => add(a, b),
            (Kind::Float, Self::Sub) => sub(a, b),
            (Kind::Float, Self::Mul) => mul(a, b),
            (Kind::Float, Self::Div) => div(a, b),
            (Kind::Float, Self::Rem) => function("remainder", &[a, b]),
            (_, operation) => {
                let (a, b) = (a as i64, b as i64);
                let result = match operation {
                    Self::Add => a.wrapping_add(b),
                    Self::Sub => a.wrapping_sub(b),
                    Self::Mul => a.wrapping_mul(b),
                    Self::Div => a.checked_div(b).unwrap_or(0),
                    Self::Rem => a.checked_rem_euclid(b).unwrap_or(0),
                };
                result as u64
            }
        }
    }
}

/// Returns `base` to the power `exponent`. Small integer powers equal the corresponding products.
pub(super) fn power_of(base: Element, exponent: Scalar) -> Element {
    const LARGEST: f64 = 16.0;
    match exponent.number() {
        Some(0.5) => function("sqrt", &[base]),
        Some(-0.5) => inverse(function("sqrt", &[base])),
        Some(number) if number.fract() == 0.0 && number.abs() <= LARGEST => {
            let whole = power(base, number.abs() as u64);
            if number < 0.0 { inverse(whole) } else { whole }
        }
        _ => function("power", &[base, exponent.element(Kind::Float)]),
    }
}

/// Returns the absolute value of a float.
pub(super) fn abs(a: Element) -> Element {
    if order(a) < 0 { neg(a) } else { a }
}

/// Returns the sign of a float: 1, 0 or -1.
pub(super) fn sign(a: Element) -> Element {
    match order(a).signum() {
        0 => 0,
        1 => 1,
        _ => neg(1),
    }
}

/// Returns `a` if `decides` is positive, and zero otherwise.
pub(super) fn where_above(decides: Element, a: Element) -> Element {
    if order(decides) > 0 { a } else { 0 }
}

/// Returns the gradient of a sigmoid from its result and the result's gradient.
pub(super) fn sigmoid_gradient(result: Element, grad: Element) -> Element {
    mul(grad, mul(result, sub(1, result)))
}

/// An operand of a step: its element, paired with the scalar that it comes from, if any.
pub(super) type Operand = (Element, Option<Scalar>);

/// Returns the result of a step of a fused program.
pub(super) fn step(operation: PointwiseOperation, first: Operand, second: Operand) -> Element {
    use PointwiseOperation as Step;
    let (a, b) = (first.0, second.0);
    match operation {
        Step::Add => add(a, b),
        Step::Sub => sub(a, b),
        Step::Mul => mul(a, b),
        Step::Div => match second.1 {
            Some(scalar) => mul(a, scalar.inverse()),
            None => div(a, b),
        },
        Step::Powf => match second.1 {
            Some(scalar) => power_of(a, scalar),
            None => function("power", &[a, b]),
        },
        Step::Neg => neg(a),
        Step::Abs => abs(a),
        Step::Recip => inverse(a),
        Step::Sqrt => function("sqrt", &[a]),
        Step::Exp => function("exp", &[a]),
        Step::Log => function("log", &[a]),
        Step::Tanh => function("tanh", &[a]),
        Step::Relu => where_above(a, a),
        Step::ReluBackward => where_above(a, b),
        Step::Sigmoid => function("sigmoid", &[a]),
        Step::SigmoidBackward => sigmoid_gradient(a, b),
    }
}
