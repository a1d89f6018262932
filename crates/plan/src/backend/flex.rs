//! The memory of each operation's results on Burn's CPU backend.
//!
//! The rules follow `burn-flex` 0.22.1, operation by operation. They must be checked for every upgrade of Burn. Views
//! share memory. Elementwise operations overwrite a contiguous operand whose memory no other tensor shares. Everything
//! else allocates. If no rule covers a case, the result gets new, contiguous memory.

use burn_ir::{
    ActivationOperationIr as A, BaseOperationIr as Base, BinaryOpIr, BoolOperationIr,
    FloatOperationIr as F, ModuleOperationIr as M, NumericOperationIr as N, OperationIr, ScalarIr,
    ScalarOpIr, SliceOpIr, TensorIr,
};

use super::allocation::{Allocation, Operand};
use super::strides::{Strides, broadcast};

/// Returns the allocation of the first result. All other results get new memory. `operands` are in the order in which
/// the operation lists its inputs.
pub(crate) fn place(operation: &OperationIr, operands: &[Operand]) -> Allocation {
    let shape = |tensor: &TensorIr| tensor.shape.to_vec();
    let found = match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            base(op, operands)
        }
        OperationIr::NumericFloat(_, op) => numeric(op, operands),
        OperationIr::NumericInt(_, op) => numeric(op, operands),
        OperationIr::Float(_, op) => float(op, operands),
        OperationIr::Activation(op) => activation(op, operands),
        OperationIr::Module(op) => module(op, operands),
        OperationIr::Bool(op) => boolean(op, operands),
        _ => None,
    };
    found.unwrap_or_else(|| {
        let first = operation.outputs().next();
        Allocation::fresh(&first.map(shape).unwrap_or_default())
    })
}

fn base(op: &Base, operands: &[Operand]) -> Option<Allocation> {
    let first = operands.first()?;
    let view = |strides| Some(Allocation::View(0, strides));
    match op {
        Base::Reshape(op) => first.strides.reshaped(&op.out.shape).and_then(view),
        Base::SwapDims(op) => view(first.strides.swapped(op.dim1, op.dim2)),
        Base::Permute(op) => view(first.strides.permuted(&op.axes)),
        Base::Expand(op) => view(first.strides.expanded(&op.out.shape)),
        Base::Unfold(op) => view(first.strides.unfolded(&op.out.shape, op.dim, op.step)),
        Base::Slice(op) => view(sliced(op, &first.strides)),
        Base::Cast(op) if op.input.dtype == op.out.dtype => view(first.strides.clone()),
        Base::Cat(op) if op.tensors.len() == 1 => view(first.strides.clone()),
        Base::SliceAssign(_) => over_start(first),
        Base::SelectAssign(_) | Base::Scatter(_) => over(first),
        Base::MaskFill(op) => over(&expanded(first, &op.out.shape)),
        Base::MaskWhere(op) => {
            let tensor = expanded(first, &op.out.shape);
            let value = expanded(operands.get(2)?, &op.out.shape);
            over(&tensor).or_else(|| match over(&value)? {
                Allocation::Over(_, strides) => Some(Allocation::Over(2, strides)),
                other => Some(other),
            })
        }
        _ => None,
    }
}

fn numeric(op: &N, operands: &[Operand]) -> Option<Allocation> {
    match op {
        N::Add(op) | N::Sub(op) | N::Mul(op) | N::Div(op) | N::Rem(op) => binary(op, operands),
        N::AddScalar(_) | N::SubScalar(_) | N::MulScalar(_) | N::DivScalar(_) | N::RemScalar(_) => {
            scalar(operands.first()?)
        }
        N::PowiScalar(op) => power(op, operands),
        N::Abs(_) | N::Neg(_) | N::Sign(_) | N::Clamp(_) | N::ClampMin(_) | N::ClampMax(_) => {
            unary(operands.first()?)
        }
        _ => None,
    }
}

fn float(op: &F, operands: &[Operand]) -> Option<Allocation> {
    match op {
        F::PowfScalar(op) => power(op, operands),
        F::Powf(op) | F::ArcTan2(op) | F::Hypot(op) => binary(op, operands),
        F::Exp(_)
        | F::Log(_)
        | F::Log1p(_)
        | F::Erf(_)
        | F::Sqrt(_)
        | F::Cos(_)
        | F::Cosh(_)
        | F::Sin(_)
        | F::Sinh(_)
        | F::Tan(_)
        | F::Tanh(_)
        | F::ArcCos(_)
        | F::ArcCosh(_)
        | F::ArcSin(_)
        | F::ArcSinh(_)
        | F::ArcTan(_)
        | F::ArcTanh(_)
        | F::Round(_)
        | F::Floor(_)
        | F::Ceil(_)
        | F::Trunc(_)
        | F::Recip(_) => unary(operands.first()?),
        _ => None,
    }
}

fn activation(op: &A, operands: &[Operand]) -> Option<Allocation> {
    match op {
        A::Relu(_)
        | A::LeakyRelu(_)
        | A::Gelu(_)
        | A::Sigmoid(_)
        | A::HardSigmoid(_)
        | A::LogSigmoid(_) => unary(operands.first()?),
        A::ReluBackward(op)
        | A::PRelu(op)
        | A::GeluBackward(op)
        | A::SigmoidBackward(op)
        | A::LogSigmoidBackward(op) => binary(op, operands),
        // The backend subtracts a reduced tensor and then works on the difference.
        A::LogSoftmax(_) => over_start(operands.first()?),
        _ => None,
    }
}

fn boolean(op: &BoolOperationIr, operands: &[Operand]) -> Option<Allocation> {
    match op {
        BoolOperationIr::Not(_) => over_start(operands.first()?),
        BoolOperationIr::And(op) | BoolOperationIr::Or(op) | BoolOperationIr::Xor(op) => {
            let (lhs, rhs) = pair(op, operands)?;
            if !(lhs.strides.is_contiguous() && rhs.strides.is_contiguous()) {
                return None;
            }
            over_start(&lhs).or_else(|| {
                over_start(&rhs)?;
                Some(Allocation::Over(1, rhs.strides))
            })
        }
        _ => None,
    }
}

fn module(op: &M, operands: &[Operand]) -> Option<Allocation> {
    match op {
        // A chain of elementwise operations on the first input.
        M::BatchNorm(_) => {
            let x = operands.first()?;
            (x.is_unique && x.strides.is_dense_beside(&x.strides))
                .then(|| Allocation::Over(0, x.strides.clone()))
        }
        M::Conv2dWeightBackward(op) if op.options.groups == 1 => {
            let size = |dim: usize| {
                let (x, grad) = (op.x.shape[dim + 2], op.output_grad.shape[dim + 2]);
                let (before, _) = op.options.padding[dim];
                let window = op.options.stride[dim] * grad.saturating_sub(1) + 1;
                (x + 2 * before).saturating_sub(window) / op.options.dilation[dim] + 1
            };
            // A convolution of the input with the gradient, with batch and channels swapped. The result is a view of
            // its output.
            let computed = [op.x.shape[1], op.output_grad.shape[1], size(0), size(1)];
            let whole = Strides::contiguous(&computed);
            let num_elements = whole.num_elements();
            let strides = whole.swapped(0, 1).sliced(&op.out.shape, &[]);
            Some(Allocation::New(strides, num_elements))
        }
        _ => None,
    }
}

/// Returns the allocation for `x` raised to a constant power. Some exponents have special rules.
fn power(op: &ScalarOpIr, operands: &[Operand]) -> Option<Allocation> {
    let operand = operands.first()?;
    let exponent = match op.rhs {
        ScalarIr::Float(value) => value,
        ScalarIr::Int(value) => value as f64,
        ScalarIr::UInt(value) => value as f64,
        ScalarIr::Bool(value) => f64::from(u8::from(value)),
    };
    if exponent == 1.0 {
        Some(Allocation::View(0, operand.strides.clone()))
    } else if exponent == -1.0 {
        unary(operand)
    } else if [0.0, 2.0, -2.0].contains(&exponent) {
        None
    } else {
        scalar(operand)
    }
}

fn binary(op: &BinaryOpIr, operands: &[Operand]) -> Option<Allocation> {
    let (lhs, rhs) = pair(op, operands)?;
    if lhs.is_unique && lhs.strides.is_dense_beside(&rhs.strides) {
        return Some(Allocation::Over(0, lhs.strides));
    }
    if rhs.is_unique && rhs.strides.is_dense_beside(&lhs.strides) {
        return Some(Allocation::Over(1, rhs.strides));
    }
    Some(Allocation::fresh(&lhs.strides.shape))
}

fn pair(op: &BinaryOpIr, operands: &[Operand]) -> Option<(Operand, Operand)> {
    let [lhs, rhs] = operands else { return None };
    let shape = broadcast(&op.lhs.shape, &op.rhs.shape);
    Some((expanded(lhs, &shape), expanded(rhs, &shape)))
}

fn expanded(operand: &Operand, shape: &[usize]) -> Operand {
    let strides = if operand.strides.shape == shape {
        operand.strides.clone()
    } else {
        operand.strides.expanded(shape)
    };
    Operand {
        strides,
        ..operand.clone()
    }
}

fn scalar(operand: &Operand) -> Option<Allocation> {
    over_start(operand)
}

fn unary(operand: &Operand) -> Option<Allocation> {
    if let Some(place) = over_start(operand) {
        return Some(place);
    }
    // The backend maps the whole memory in order, so the result has the operand's strides.
    if operand.strides.covers(operand.memory_elements) {
        let num_elements = operand.memory_elements;
        return Some(Allocation::New(operand.strides.clone(), num_elements));
    }
    None
}

/// Returns the allocation that overwrites an operand, or `None` if the operand is not contiguous from the start of its
/// memory or shares it.
fn over_start(operand: &Operand) -> Option<Allocation> {
    (operand.is_unique && operand.strides.is_from_start())
        .then(|| Allocation::Over(0, operand.strides.clone()))
}

/// Like [`over_start`], but the operand may start anywhere in its memory.
fn over(operand: &Operand) -> Option<Allocation> {
    (operand.is_unique && operand.strides.is_contiguous())
        .then(|| Allocation::Over(0, operand.strides.clone()))
}

fn sliced(op: &SliceOpIr, strides: &Strides) -> Strides {
    let starts: Vec<_> = op
        .ranges
        .iter()
        .zip(&op.tensor.shape.to_vec())
        .map(|(slice, size)| {
            let size = *size as isize;
            let index = |at: isize| {
                if at < 0 {
                    (size + at).max(0)
                } else {
                    at.min(size)
                }
            };
            let start = if slice.step > 0 {
                index(slice.start)
            } else {
                slice.end.map_or(size, index) - 1
            };
            (start.max(0) as usize, slice.step)
        })
        .collect();
    strides.sliced(&op.out.shape, &starts)
}

/// Returns the allocation of a custom operation's first result if the operation can overwrite this operand.
pub(crate) fn over_whole(operand: &Operand, index: usize) -> Option<Allocation> {
    let is_whole = operand.strides.num_elements() == operand.memory_elements;
    match over_start(operand).filter(|_| is_whole)? {
        Allocation::Over(_, strides) => Some(Allocation::Over(index, strides)),
        other => Some(other),
    }
}
