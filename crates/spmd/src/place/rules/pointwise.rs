//! Operations on the elements at one place, with broadcasting.

use burn_ir::{
    ActivationOperationIr as Activation, BaseOperationIr as Base, FloatOperationIr as Float,
    NumericOperationIr as Numeric, OperationIr,
};

use crate::place::signature::{Signature, aligned};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    if !is_pointwise(operation) {
        return None;
    }
    let out = operation.outputs().next()?.shape.to_vec();
    let inputs = operation.inputs();
    let signature = inputs.fold(Signature::new(), |s, tensor| {
        s.input_of(tensor, aligned(tensor, &out))
    });
    let outputs = operation.outputs();
    let signature = outputs.fold(signature, |s, tensor| {
        s.output_of(tensor, aligned(tensor, &out))
    });
    // Addends go through what is linear and cheap; a product with another tensor is neither reason
    // to postpone their sum nor to make it smaller.
    let linear = match operation {
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => matches!(
            op,
            Numeric::Add(_) | Numeric::Sub(_) | Numeric::Neg(_) | Numeric::MulScalar(_)
        ),
        _ => false,
    };
    let linear = linear
        || matches!(
            operation,
            OperationIr::NumericFloat(_, Numeric::DivScalar(_))
                | OperationIr::Int(burn_ir::IntOperationIr::IntoFloat(_))
        );
    Some(match linear {
        true => signature.linear_in(operation.inputs()),
        false => signature,
    })
}

fn is_pointwise(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => matches!(
            op,
            Numeric::Add(_)
                | Numeric::AddScalar(_)
                | Numeric::Sub(_)
                | Numeric::SubScalar(_)
                | Numeric::Div(_)
                | Numeric::DivScalar(_)
                | Numeric::Rem(_)
                | Numeric::RemScalar(_)
                | Numeric::Mul(_)
                | Numeric::MulScalar(_)
                | Numeric::Abs(_)
                | Numeric::Greater(_)
                | Numeric::GreaterElem(_)
                | Numeric::GreaterEqual(_)
                | Numeric::GreaterEqualElem(_)
                | Numeric::Lower(_)
                | Numeric::LowerElem(_)
                | Numeric::LowerEqual(_)
                | Numeric::LowerEqualElem(_)
                | Numeric::Clamp(_)
                | Numeric::ClampMin(_)
                | Numeric::ClampMax(_)
                | Numeric::Powi(_)
                | Numeric::PowiScalar(_)
                | Numeric::Neg(_)
                | Numeric::Sign(_)
        ),
        OperationIr::Float(_, op) => matches!(
            op,
            Float::Exp(_)
                | Float::Log(_)
                | Float::Log1p(_)
                | Float::Erf(_)
                | Float::PowfScalar(_)
                | Float::Sqrt(_)
                | Float::Cos(_)
                | Float::Cosh(_)
                | Float::Sin(_)
                | Float::Sinh(_)
                | Float::Tan(_)
                | Float::Tanh(_)
                | Float::ArcCos(_)
                | Float::ArcCosh(_)
                | Float::ArcSin(_)
                | Float::ArcSinh(_)
                | Float::ArcTan(_)
                | Float::ArcTanh(_)
                | Float::ArcTan2(_)
                | Float::Round(_)
                | Float::Floor(_)
                | Float::Ceil(_)
                | Float::Trunc(_)
                | Float::IntoInt(_)
                | Float::Recip(_)
                | Float::IsNan(_)
                | Float::IsInf(_)
                | Float::Powf(_)
                | Float::Hypot(_)
        ),
        OperationIr::Int(op) => !matches!(op, burn_ir::IntOperationIr::Matmul(_)),
        OperationIr::Bool(_) => true,
        OperationIr::Activation(op) => matches!(
            op,
            Activation::Relu(_)
                | Activation::ReluBackward(_)
                | Activation::LeakyRelu(_)
                | Activation::Gelu(_)
                | Activation::GeluBackward(_)
                | Activation::Sigmoid(_)
                | Activation::SigmoidBackward(_)
                | Activation::HardSigmoid(_)
                | Activation::LogSigmoid(_)
                | Activation::LogSigmoidBackward(_)
        ),
        _ => super::base(operation).is_some_and(|base| {
            matches!(
                base,
                Base::MaskWhere(_)
                    | Base::MaskFill(_)
                    | Base::Equal(_)
                    | Base::EqualElem(_)
                    | Base::NotEqual(_)
                    | Base::NotEqualElem(_)
                    | Base::Cast(_)
            )
        }),
    }
}
