//! Random numbers and constants: every rank generates the part that it needs.

use burn_ir::{BaseOperationIr as Base, NumericOperationIr as Numeric, OperationIr, TensorIr};

use crate::graph::random_of;
use crate::place::signature::{Signature, alphabet};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let of = |out: &TensorIr| Signature::new().output_of(out, alphabet(out.shape.num_dims()));
    match random_of(operation) {
        Some(random) => Some(of(&random.out)),
        None => Some(of(constant(operation)?).on_padding()),
    }
}

/// Returns the result of an operation that creates a constant; `None` for any other operation.
fn constant(operation: &OperationIr) -> Option<&TensorIr> {
    match operation {
        OperationIr::NumericFloat(_, Numeric::Full(op))
        | OperationIr::NumericInt(_, Numeric::Full(op)) => Some(&op.out),
        _ => match super::base::base(operation)? {
            Base::Zeros(op) | Base::Ones(op) | Base::Empty(op) => Some(&op.out),
            _ => None,
        },
    }
}
