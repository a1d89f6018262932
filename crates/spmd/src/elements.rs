//! The element types of collectives.

use burn::tensor::{BoolStore, DType};
use burn_fsdp_collectives::ElementType;

/// Returns the element type with which collectives move tensors of a type; `None` if they cannot. Bytes are moved
/// unchanged, so integers and bools are also supported.
pub(crate) fn gathered_type(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::I64 => Some(ElementType::I64),
        DType::I32 => Some(ElementType::I32),
        DType::I16 => Some(ElementType::I16),
        DType::I8 => Some(ElementType::I8),
        DType::U64 => Some(ElementType::U64),
        DType::U32 | DType::Bool(BoolStore::U32) => Some(ElementType::U32),
        DType::U16 => Some(ElementType::U16),
        DType::U8 | DType::Bool(BoolStore::U8 | BoolStore::Native) => Some(ElementType::U8),
        dtype => element_type(dtype),
    }
}

/// Returns the element type with which collectives reduce tensors of a type; `None` for types other than floats.
pub(crate) fn element_type(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::F64 => Some(ElementType::F64),
        DType::F32 | DType::Flex32 => Some(ElementType::F32),
        DType::F16 => Some(ElementType::F16),
        DType::BF16 => Some(ElementType::BF16),
        _ => None,
    }
}
