//! Pointwise operations, with broadcasting.

use burn_ir::OperationIr;

use crate::graph::{Trait, is};
use crate::place::signature::{Signature, aligned};

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    if !is(operation, Trait::Pointwise) {
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
    // Only operations that are linear in all operands run on addends. For products with another tensor, postponing the
    // reduction has no benefit.
    let linear = is(operation, Trait::Linear) || is(operation, Trait::LinearOnFloats);
    Some(if linear {
        signature.linear_in(operation.inputs())
    } else {
        signature
    })
}
