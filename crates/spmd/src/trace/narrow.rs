//! Values that would lose bits if new tensors without a specified type were created in 16 bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Distribution, TensorData, bf16, f16};
use burn_fsdp_tensors::is_half;
use burn_ir::{
    FloatOperationIr, IntOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorId,
};

use crate::error::Error;
use crate::graph::operation_name;

/// Rejects an operation that the step needs but that loses bits because new tensors have 16 bits in this trace. States
/// of zeros lose none. These lose bits:
///
/// - the module's own operations, whose tensors (such as rotations) need more bits than activations;
/// - host numbers that 16 bits cannot represent;
/// - integers, such as targets;
/// - random numbers that 16 bits cannot represent.
pub(super) fn check_narrow(
    operation: &OperationIr,
    is_of_module: bool,
    constants: &BTreeMap<TensorId, Arc<TensorData>>,
) -> Result<(), Error> {
    let lost = if is_of_module {
        Some("tensors of the module other than parameters")
    } else {
        lost_by(operation, constants)
    };
    let Some(lost) = lost else {
        return Ok(());
    };
    Err(Error::Uncapturable {
        stage: "the loss",
        produced_by: Some(operation_name(operation)),
        reason: format!(
            "two types met, and {lost} would lose bits if new tensors had the compute type; create each such tensor of \
             the loss or the module in 32 bits with `(&device, DType::F32)` or `.cast(DType::F32)`, and cast it, or the \
             tensor it meets, where two types meet"
        ),
    })
}

/// Describes the values that lose bits if the operation's new tensors have 16 bits.
fn lost_by(
    operation: &OperationIr,
    constants: &BTreeMap<TensorId, Arc<TensorData>>,
) -> Option<&'static str> {
    let reads_constant = operation
        .inputs()
        .any(|input| is_half(input.dtype) && constants.contains_key(&input.id));
    if reads_constant {
        return Some(NUMBERS);
    }
    match operation {
        OperationIr::Int(IntOperationIr::IntoFloat(cast)) => {
            is_half(cast.out.dtype).then_some("integers")
        }
        // A router records this operation with its number instead of a constant.
        OperationIr::NumericFloat(_, NumericOperationIr::Full(full)) => {
            (!survives(full.value, full.out.dtype)).then_some(NUMBERS)
        }
        // Zeros and ones are exact in 16 bits.
        OperationIr::Float(_, FloatOperationIr::Random(random)) => {
            let is_exact = matches!(random.distribution, Distribution::Bernoulli(_));
            (is_half(random.out.dtype) && !is_exact).then_some("random numbers")
        }
        _ => None,
    }
}

const NUMBERS: &str = "host numbers";

/// Returns true if a number keeps its value in this type. Types other than f16 and bf16 count as exact.
fn survives(value: ScalarIr, dtype: DType) -> bool {
    let value: f64 = value.elem();
    let kept = match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => return true,
    };
    kept == value || value.is_nan()
}
