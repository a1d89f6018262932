//! Random numbers and constants: every rank makes the part that it needs.

use burn_ir::{
    BaseOperationIr as Base, FloatOperationIr as Float, NumericOperationIr as Numeric, OperationIr,
};

use crate::place::signature::{Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let out = match operation {
        OperationIr::Float(_, Float::Random(op)) => &op.out,
        OperationIr::NumericFloat(_, Numeric::IntRandom(op))
        | OperationIr::NumericInt(_, Numeric::IntRandom(op)) => &op.out,
        OperationIr::NumericFloat(_, Numeric::Full(op))
        | OperationIr::NumericInt(_, Numeric::Full(op)) => &op.out,
        _ => match super::base::base(operation)? {
            Base::Zeros(op) | Base::Ones(op) | Base::Empty(op) => &op.out,
            _ => return None,
        },
    };
    Some(Signature::new().output_of(out, alphabet(out.shape.num_dims())))
}
