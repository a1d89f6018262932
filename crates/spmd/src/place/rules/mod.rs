//! Signatures of all operations, by family.
//!
//! | file | operations |
//! |---|---|
//! | `pointwise` | arithmetic, comparisons, activations, casts, masks |
//! | `reduction` | sums, means, extrema, and scans and sorts along a dim |
//! | `matmul` | matrix products and linear layers, with their gradients |
//! | `views` | reshapes, permutations, expansions |
//! | `slicing` | slices, assignment to slices, concatenation, repetition |
//! | `indexing` | gather, scatter, select, embeddings |
//! | `normalization` | layer norm, batch norm, softmax |
//! | `attention` | fused attention |
//! | `convolution` | convolutions and pooling, with their gradients |
//! | `random` | random numbers and constants |
//! | `kernels` | kernels that later replace composed operations, only for type checks |
//!
//! Operations outside of these families run on whole tensors. The families `indexing`, `attention`, `convolution` and
//! `random` run only on equal parts: an index in padding could be out of bounds, and random numbers depend on position.
//! Constants accept padding. Integer arithmetic does not.

mod attention;
mod base;
mod convolution;
mod indexing;
mod kernels;
mod matmul;
#[cfg(feature = "faults")]
pub mod mutants;
mod normalization;
mod pointwise;
mod random;
mod reduction;
mod slicing;
mod views;

use burn_ir::{CustomOpIr, OperationIr};

use super::signature::Signature;

pub(super) use matmul::without_bias;

/// Returns the signature of an operation.
pub(super) fn signature(operation: &OperationIr) -> Signature {
    let signature = of_family(operation);
    #[cfg(feature = "faults")]
    let signature = mutants::applied(operation, signature);
    signature
}

fn of_family(operation: &OperationIr) -> Signature {
    pointwise::signature(operation)
        .or_else(|| reduction::signature(operation))
        .or_else(|| matmul::signature(operation))
        .or_else(|| views::signature(operation))
        .or_else(|| slicing::signature(operation))
        .or_else(|| normalization::signature(operation))
        .map(|signature| {
            if takes_padding(operation) {
                signature.on_padding()
            } else {
                signature
            }
        })
        .or_else(|| indexing::signature(operation))
        .or_else(|| attention::signature(operation))
        .or_else(|| convolution::signature(operation))
        .or_else(|| random::signature(operation))
        .unwrap_or_else(|| whole(operation))
}

/// Returns true for operations that treat rows independently and accept any value. Integer arithmetic does not, because
/// it could divide by zero in padding.
fn takes_padding(operation: &OperationIr) -> bool {
    !matches!(
        operation,
        OperationIr::NumericInt(..) | OperationIr::Int(..)
    )
}

/// Returns the signature of an operation that runs on whole tensors.
fn whole(operation: &OperationIr) -> Signature {
    let inputs = operation.inputs();
    let signature = inputs.fold(Signature::new(), |s, tensor| s.input(tensor, ""));
    let outputs = operation.outputs();
    outputs.fold(signature, |s, tensor| s.output(tensor, ""))
}

/// Returns the signature of a kernel that replaces composed operations after values are placed.
pub(super) fn of_kernel(call: &CustomOpIr) -> Option<Signature> {
    kernels::signature(call)
}

/// Returns the signature of an operation or a kernel; `None` for other custom operations.
pub(crate) fn signature_of(operation: &OperationIr) -> Option<Signature> {
    match operation {
        OperationIr::Custom(call) => of_kernel(call),
        operation => Some(signature(operation)),
    }
}

/// Adapts the ranges of a slicing operation to one rank's shapes, which its tensors already have.
pub(super) fn localize(operation: &mut OperationIr) {
    slicing::localize(operation);
}

/// Returns true if an operation computes its results element by element.
pub(crate) fn is_pointwise(operation: &OperationIr) -> bool {
    pointwise::signature(operation).is_some()
}

/// Returns true for random numbers, constants, pointwise operations and views. These may be deferred until a node reads
/// their results, if their inputs are also deferred.
pub(crate) fn may_wait(operation: &OperationIr) -> bool {
    random::signature(operation).is_some()
        || pointwise::signature(operation).is_some()
        || views::signature(operation).is_some()
}
