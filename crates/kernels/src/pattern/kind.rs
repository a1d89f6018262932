//! The operations in patterns.

use burn::tensor::{DType, IndexingUpdateOp};
use burn_ir::{
    ActivationOperationIr, BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr,
    ScalarIr,
};

use crate::halves::are_alike;

/// An operation of a pattern on 32- or 16-bit floats, without its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A sum of two operands.
    Add,
    /// A difference.
    Sub,
    /// A product of two operands.
    Mul,
    /// A quotient.
    Div,
    /// The negative.
    Neg,
    /// Cast from 16 to 32 bits.
    Widen,
    /// Cast from 32 to 16 bits.
    Narrow,
    /// The exponential.
    Exp,
    /// The natural logarithm.
    Log,
    /// The square root.
    Sqrt,
    /// The reciprocal.
    Recip,
    /// A tensor of ones.
    Ones,
    /// A matrix product.
    Matmul,
    /// A reshape.
    Reshape,
    /// Two dims swapped, the smaller one first.
    SwapDims(usize, usize),
    /// The sum along a dim.
    SumDim(usize),
    /// The mean along a dim.
    MeanDim(usize),
    /// The maximum along a dim.
    MaxDim(usize),
    /// Along several dims, as a bit mask.
    SumDims(u64),
    /// A number added.
    AddScalar(f64),
    /// A product with a number.
    MulScalar(f64),
    /// A quotient by a number.
    DivScalar(f64),
    /// A power.
    PowfScalar(f64),
    /// Operands: a tensor, then a mask.
    MaskFill(f64),
    /// The positive part.
    Relu,
    /// Operands: the operand of a [`Relu`](Self::Relu), then the gradient of its result.
    ReluBackward,
    /// The hyperbolic tangent.
    Tanh,
    /// The absolute value.
    Abs,
    /// The sigmoid.
    Sigmoid,
    /// Operands: a result, then its gradient.
    SigmoidBackward,
    /// A kernel with this name, which an earlier pattern inserted.
    Kernel(&'static str),
    /// A tensor of zeros.
    Zeros,
    /// Along a dim. Operands: a tensor, then indices.
    Gather(usize),
    /// Along a dim. Operands: a tensor, indices, then values.
    ScatterAdd(usize),
}

/// Returns the kind of an operation whose operands have several types: one is a mask, indices, or a float of a
/// different type.
fn mixed_kind_of(operation: &OperationIr) -> Option<Kind> {
    match operation {
        OperationIr::BaseFloat(BaseOperationIr::Gather(op))
            if are_alike([&op.tensor, &op.out]) && op.indices.dtype.is_int() =>
        {
            Some(Kind::Gather(op.dim))
        }
        OperationIr::BaseFloat(BaseOperationIr::Scatter(op))
            if are_alike([&op.tensor, &op.value, &op.out])
                && op.indices.dtype.is_int()
                && op.update == IndexingUpdateOp::Add =>
        {
            Some(Kind::ScatterAdd(op.dim))
        }
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(op))
            if are_alike([&op.tensor, &op.out]) && matches!(op.mask.dtype, DType::Bool(_)) =>
        {
            Some(Kind::MaskFill(op.value.elem::<f64>()))
        }
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => match (op.input.dtype, op.out.dtype) {
            (DType::BF16, DType::F32) => Some(Kind::Widen),
            (DType::F32, DType::BF16) => Some(Kind::Narrow),
            _ => None,
        },
        _ => None,
    }
}

/// Returns the kind of an operation; `None` for one that no pattern has.
pub fn kind_of(operation: &OperationIr) -> Option<Kind> {
    if !are_alike(operation.nodes()) {
        return mixed_kind_of(operation);
    }
    let number = |scalar: &ScalarIr| scalar.elem::<f64>();
    Some(match operation {
        OperationIr::NumericFloat(_, operation) => match operation {
            NumericOperationIr::Add(_) => Kind::Add,
            NumericOperationIr::Sub(_) => Kind::Sub,
            NumericOperationIr::Mul(_) => Kind::Mul,
            NumericOperationIr::Div(_) => Kind::Div,
            NumericOperationIr::Neg(_) => Kind::Neg,
            NumericOperationIr::Abs(_) => Kind::Abs,
            NumericOperationIr::SumDim(op) => Kind::SumDim(op.axis),
            NumericOperationIr::MeanDim(op) => Kind::MeanDim(op.axis),
            NumericOperationIr::MaxDim(op) => Kind::MaxDim(op.axis),
            NumericOperationIr::SumDims(op) => Kind::SumDims(bits(&op.axes)?),
            NumericOperationIr::AddScalar(op) => Kind::AddScalar(number(&op.rhs)),
            NumericOperationIr::MulScalar(op) => Kind::MulScalar(number(&op.rhs)),
            NumericOperationIr::DivScalar(op) => Kind::DivScalar(number(&op.rhs)),
            _ => return None,
        },
        OperationIr::Float(_, operation) => match operation {
            FloatOperationIr::Exp(_) => Kind::Exp,
            FloatOperationIr::Log(_) => Kind::Log,
            FloatOperationIr::Sqrt(_) => Kind::Sqrt,
            FloatOperationIr::Recip(_) => Kind::Recip,
            FloatOperationIr::Tanh(_) => Kind::Tanh,
            FloatOperationIr::Matmul(_) => Kind::Matmul,
            FloatOperationIr::PowfScalar(op) => Kind::PowfScalar(number(&op.rhs)),
            _ => return None,
        },
        OperationIr::Activation(operation) => match operation {
            ActivationOperationIr::Relu(_) => Kind::Relu,
            ActivationOperationIr::ReluBackward(_) => Kind::ReluBackward,
            ActivationOperationIr::Sigmoid(_) => Kind::Sigmoid,
            ActivationOperationIr::SigmoidBackward(_) => Kind::SigmoidBackward,
            _ => return None,
        },
        OperationIr::BaseFloat(operation) => match operation {
            BaseOperationIr::Ones(_) => Kind::Ones,
            BaseOperationIr::Zeros(_) => Kind::Zeros,
            BaseOperationIr::Reshape(_) => Kind::Reshape,
            BaseOperationIr::SwapDims(op) => {
                Kind::SwapDims(op.dim1.min(op.dim2), op.dim1.max(op.dim2))
            }
            _ => return None,
        },
        _ => return None,
    })
}

/// Returns a set of dims as a bit mask; `None` if a dim is too large.
pub(crate) fn bits(dims: &[usize]) -> Option<u64> {
    dims.iter().try_fold(0, |bits, dim| {
        let bit = u32::try_from(*dim)
            .ok()
            .and_then(|dim| 1_u64.checked_shl(dim));
        bit.map(|bit| bits | bit)
    })
}
