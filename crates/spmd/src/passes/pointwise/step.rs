//! Burn's pointwise operations as steps of a program.

use std::collections::BTreeMap;

use burn_fsdp_kernels::{
    PointwiseOperand, PointwiseOperation as Step, PointwiseProgram, are_alike,
};
use burn_ir::{
    ActivationOperationIr, BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr,
    ScalarOpIr, TensorId, TensorIr, UnaryOpIr,
};

use crate::graph::Node;

/// A pointwise operation on 32- or 16-bit floats.
pub(super) struct Form<'a> {
    operation: Step,
    first: &'a TensorIr,
    second: Second<'a>,
    pub(super) out: &'a TensorIr,
}

/// The second operand.
enum Second<'a> {
    None,
    Tensor(&'a TensorIr),
    Number(ScalarIr),
    /// The first operand again.
    Same,
    /// No second operand: the result is one over the square of the first, which is computed like [`Same`](Self::Same).
    Square,
}

impl<'a> Form<'a> {
    /// Returns the form of an operation, if a program can contain it.
    pub(super) fn of(node: &'a Node) -> Option<Self> {
        let is_plain = node.collective.is_none() && node.shift.is_none();
        let form = if is_plain {
            form(&node.operation)?
        } else {
            return None;
        };
        let changes = !node.scalars.is_empty();
        // A changing exponent may reach a value for which Burn computes the power differently.
        let is_known =
            !changes || matches!(form.second, Second::Number(_)) && form.operation != Step::Powf;
        (is_known && are_alike(form.inputs().chain([form.out]))).then_some(form)
    }

    /// Returns the tensors that the operation reads.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &'a TensorIr> + use<'a> {
        let second = match self.second {
            Second::Tensor(tensor) => Some(tensor),
            _ => None,
        };
        std::iter::once(self.first).chain(second)
    }

    /// Returns how many steps of a program the operation needs.
    pub(super) fn num_steps(&self) -> usize {
        match self.second {
            Second::Square => 2,
            _ => 1,
        }
    }

    /// Adds the operation to a program, and returns its result and the index of its scalar.
    pub(super) fn add_to(
        &self,
        program: &mut PointwiseProgram,
        known: &BTreeMap<TensorId, PointwiseOperand>,
    ) -> Option<(PointwiseOperand, Option<usize>)> {
        let first = *known.get(&self.first.id)?;
        let mut number = None;
        let second = match self.second {
            Second::None => None,
            Second::Tensor(tensor) => Some(*known.get(&tensor.id)?),
            Second::Number(scalar) => {
                let operand = program.number(scalar.elem());
                if let PointwiseOperand::Number(index) = operand {
                    number = Some(index);
                }
                Some(operand)
            }
            Second::Same => Some(first),
            Second::Square => {
                let square = program.push(Step::Mul, first, Some(first));
                return Some((program.push(self.operation, square, None), None));
            }
        };
        Some((program.push(self.operation, first, second), number))
    }
}

fn form(operation: &OperationIr) -> Option<Form<'_>> {
    match operation {
        OperationIr::NumericFloat(_, operation) => Some(match operation {
            NumericOperationIr::Add(op) => binary(Step::Add, op),
            NumericOperationIr::Sub(op) => binary(Step::Sub, op),
            NumericOperationIr::Mul(op) => binary(Step::Mul, op),
            NumericOperationIr::Div(op) => binary(Step::Div, op),
            NumericOperationIr::AddScalar(op) => scalar(Step::Add, op),
            NumericOperationIr::SubScalar(op) => scalar(Step::Sub, op),
            NumericOperationIr::MulScalar(op) => scalar(Step::Mul, op),
            NumericOperationIr::DivScalar(op) => scalar(Step::Div, op),
            NumericOperationIr::Neg(op) => unary(Step::Neg, op),
            NumericOperationIr::Abs(op) => unary(Step::Abs, op),
            _ => return None,
        }),
        OperationIr::Float(_, operation) => Some(match operation {
            FloatOperationIr::Exp(op) => unary(Step::Exp, op),
            FloatOperationIr::Log(op) => unary(Step::Log, op),
            FloatOperationIr::Sqrt(op) => unary(Step::Sqrt, op),
            FloatOperationIr::Tanh(op) => unary(Step::Tanh, op),
            FloatOperationIr::Recip(op) => unary(Step::Recip, op),
            FloatOperationIr::Powf(op) => binary(Step::Powf, op),
            FloatOperationIr::PowfScalar(op) => return power(op),
            _ => return None,
        }),
        OperationIr::Activation(operation) => Some(match operation {
            ActivationOperationIr::Relu(op) => unary(Step::Relu, op),
            ActivationOperationIr::ReluBackward(op) => binary(Step::ReluBackward, op),
            ActivationOperationIr::Sigmoid(op) => unary(Step::Sigmoid, op),
            ActivationOperationIr::SigmoidBackward(op) => binary(Step::SigmoidBackward, op),
            _ => return None,
        }),
        _ => None,
    }
}

fn unary(operation: Step, op: &UnaryOpIr) -> Form<'_> {
    Form {
        operation,
        first: &op.input,
        second: Second::None,
        out: &op.out,
    }
}

fn binary(operation: Step, op: &BinaryOpIr) -> Form<'_> {
    Form {
        operation,
        first: &op.lhs,
        second: Second::Tensor(&op.rhs),
        out: &op.out,
    }
}

fn scalar(operation: Step, op: &ScalarOpIr) -> Form<'_> {
    Form {
        operation,
        first: &op.lhs,
        second: Second::Number(op.rhs),
        out: &op.out,
    }
}

/// Returns a power as Burn's CPU backend computes it; some integer powers are products.
fn power(op: &ScalarOpIr) -> Option<Form<'_>> {
    let exponent: f64 = op.rhs.elem();
    let (operation, second) = match exponent {
        2.0 => (Step::Mul, Second::Same),
        -1.0 => (Step::Recip, Second::None),
        -2.0 => (Step::Recip, Second::Square),
        // The results are ones, or the operand itself.
        0.0 | 1.0 => return None,
        _ => (Step::Powf, Second::Number(op.rhs)),
    };
    Some(Form {
        second,
        ..scalar(operation, op)
    })
}
