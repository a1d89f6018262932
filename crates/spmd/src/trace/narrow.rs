//! What may not be made in 16 bits where no type is named.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_ir::{IntOperationIr, OperationIr, TensorId};

use crate::error::Error;
use crate::graph::operation_name;

/// Refuses an operation that a step needs, of a trace in which new tensors are narrow, if more was lost by it than states of
/// zeros lose: one of the module's own, whose tensors (rotations, and their kind) want more bits than activations; numbers of the
/// host; integers, such as targets.
pub(super) fn check_narrow(
    operation: &OperationIr,
    is_of_module: bool,
    constants: &BTreeMap<TensorId, Arc<TensorData>>,
) -> Result<(), Error> {
    let is_half = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
    let reads_constant = operation
        .inputs()
        .any(|input| is_half(input.dtype) && constants.contains_key(&input.id));
    let of_integers = match operation {
        OperationIr::Int(IntOperationIr::IntoFloat(cast)) => is_half(cast.out.dtype),
        _ => false,
    };
    let lost = match (is_of_module, reads_constant, of_integers) {
        (true, ..) => "tensors of the module that are no parameters",
        (_, true, _) => "numbers of the host",
        (.., true) => "integers",
        _ => return Ok(()),
    };
    Err(Error::Uncapturable {
        stage: "the loss",
        produced_by: Some(operation_name(operation)),
        reason: format!(
            "two types met, and with new tensors in the compute type {lost} would lose bits; give each tensor that is made in \
             the loss or in the module a type, by `(&device, dtype)` or `.cast(..)`"
        ),
    })
}
