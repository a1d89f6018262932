//! Element types of Burn and of checkpoints.

use burn::tensor::{BoolStore, DType};
use burn_fsdp_checkpoint::Dtype;

use crate::error::{CheckpointError, optimizer_error};

/// Returns the type in which a Burn tensor is saved.
pub(crate) fn dtype_of(name: &str, dtype: DType) -> Result<Dtype, CheckpointError> {
    match dtype {
        DType::F64 => Ok(Dtype::F64),
        DType::F32 | DType::Flex32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        DType::I64 => Ok(Dtype::I64),
        DType::I32 => Ok(Dtype::I32),
        DType::I16 => Ok(Dtype::I16),
        DType::I8 => Ok(Dtype::I8),
        DType::U64 => Ok(Dtype::U64),
        DType::U32 | DType::Bool(BoolStore::U32) => Ok(Dtype::U32),
        DType::U16 => Ok(Dtype::U16),
        DType::U8 => Ok(Dtype::U8),
        DType::Bool(BoolStore::Native | BoolStore::U8) => Ok(Dtype::BOOL),
        dtype => Err(CheckpointError::Type {
            name: name.to_owned(),
            dtype,
        }),
    }
}

/// Returns Burn's type for a saved tensor of optimizer state.
pub(crate) fn burn_dtype(name: &str, dtype: Dtype) -> Result<DType, CheckpointError> {
    match dtype {
        Dtype::F64 => Ok(DType::F64),
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        other => Err(optimizer_error(format!("`{name}` is of type {other}"))),
    }
}
