//! Element types of checkpoints.

use burn::tensor::DType;
use burn_fsdp_checkpoint::Dtype;
use burn_fsdp_collectives::ElementType;
use burn_fsdp_tensors::{float_type, reduced_type, saved_type};

use crate::error::{CheckpointError, optimizer_error};

/// Returns the type in which a Burn tensor is saved.
pub fn dtype_of(name: &str, dtype: DType) -> Result<Dtype, CheckpointError> {
    saved_type(dtype).ok_or_else(|| CheckpointError::Type {
        name: name.to_owned(),
        dtype,
    })
}

/// Returns Burn's type for a saved tensor of optimizer state.
pub fn burn_dtype(name: &str, dtype: Dtype) -> Result<DType, CheckpointError> {
    float_type(dtype).ok_or_else(|| not_float(name, dtype))
}

/// Returns the collectives' type for a saved tensor of optimizer state.
pub fn element_of(name: &str, dtype: Dtype) -> Result<ElementType, CheckpointError> {
    let element = float_type(dtype).and_then(reduced_type);
    element.ok_or_else(|| not_float(name, dtype))
}

fn not_float(name: &str, dtype: Dtype) -> CheckpointError {
    optimizer_error(format!("`{name}` is of type {dtype}"))
}
