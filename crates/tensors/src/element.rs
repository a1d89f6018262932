//! Element types of Burn, of collectives and of files.

use burn::tensor::{BoolStore, DType, FloatDType, Tensor};
use burn_fsdp_collectives::ElementType;
use safetensors::Dtype;

/// The types that tensors of floats have in files.
const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// Returns the collectives' and the files' type for a type of Burn. Quantized types have none.
fn of(dtype: DType) -> Option<(ElementType, Dtype)> {
    Some(match dtype {
        DType::F64 => (ElementType::F64, Dtype::F64),
        DType::F32 | DType::Flex32 => (ElementType::F32, Dtype::F32),
        DType::F16 => (ElementType::F16, Dtype::F16),
        DType::BF16 => (ElementType::BF16, Dtype::BF16),
        DType::I64 => (ElementType::I64, Dtype::I64),
        DType::I32 => (ElementType::I32, Dtype::I32),
        DType::I16 => (ElementType::I16, Dtype::I16),
        DType::I8 => (ElementType::I8, Dtype::I8),
        DType::U64 => (ElementType::U64, Dtype::U64),
        DType::U32 | DType::Bool(BoolStore::U32) => (ElementType::U32, Dtype::U32),
        DType::U16 => (ElementType::U16, Dtype::U16),
        DType::U8 => (ElementType::U8, Dtype::U8),
        DType::Bool(BoolStore::Native | BoolStore::U8) => (ElementType::U8, Dtype::BOOL),
        _ => return None,
    })
}

/// Returns the collectives' type for elements that are moved unchanged. Quantized types have none.
pub fn moved_type(dtype: DType) -> Option<ElementType> {
    of(dtype).map(|(element, _)| element)
}

/// Returns the collectives' type for elements that are reduced. Only float types have one.
pub fn reduced_type(dtype: DType) -> Option<ElementType> {
    moved_type(dtype).filter(|element| element.is_float())
}

/// Returns the files' type for elements that are saved unchanged. Quantized types have none.
pub fn saved_type(dtype: DType) -> Option<Dtype> {
    of(dtype).map(|(_, saved)| saved)
}

/// Returns Burn's type for saved floats. Other types have none.
pub fn float_type(saved: Dtype) -> Option<DType> {
    FLOATS
        .into_iter()
        .find(|dtype| saved_type(*dtype) == Some(saved))
}

/// Returns Burn's type for floats that collectives move. Other types have none.
pub(crate) fn float_of(element: ElementType) -> Option<FloatDType> {
    Some(match element {
        ElementType::F64 => FloatDType::F64,
        ElementType::F32 => FloatDType::F32,
        ElementType::F16 => FloatDType::F16,
        ElementType::BF16 => FloatDType::BF16,
        _ => return None,
    })
}

/// Returns `tensor` in `dtype`; the same tensor if it already has that type.
pub fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}

/// Returns true for `f16` and `bf16`.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Returns true if gradients can be reduced into shards. The types are, in this order, those of the shards, of the
/// gradients and of the reduction. `f64` cannot be mixed with other types, and gradients in `flex32` cannot be reduced.
pub fn can_reduce(types: [DType; 3]) -> bool {
    let is_mixed = types.contains(&DType::F64) && types != [DType::F64; 3];
    !is_mixed && !types[1..].contains(&DType::Flex32)
}

#[cfg(test)]
mod tests {
    use burn::tensor::quantization::QuantScheme;

    use super::*;

    const ALL: [DType; 16] = [
        DType::F64,
        DType::F32,
        DType::Flex32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::Bool(BoolStore::Native),
        DType::Bool(BoolStore::U8),
        DType::Bool(BoolStore::U32),
    ];

    #[test]
    fn elements_have_the_same_size_everywhere() {
        for dtype in ALL {
            let moved = moved_type(dtype).expect("is moved");
            assert_eq!(moved.size(), dtype.size(), "{dtype:?}");
            let saved = saved_type(dtype).expect("is saved");
            assert_eq!(saved.bitsize(), 8 * dtype.size(), "{dtype:?}");
        }
    }

    #[test]
    fn only_floats_are_reduced_and_read_back() {
        for dtype in ALL {
            let reduced = reduced_type(dtype);
            assert_eq!(reduced.is_some(), dtype.is_float(), "{dtype:?}");
            let back = saved_type(dtype).and_then(float_type);
            assert_eq!(back.is_some(), dtype.is_float(), "{dtype:?}");
            if let Some(back) = back {
                assert_eq!(moved_type(back), reduced, "{dtype:?}");
            }
        }
    }

    #[test]
    fn doubles_are_reduced_only_as_doubles() {
        let (f64, f32, bf16) = (DType::F64, DType::F32, DType::BF16);
        for types in [[f64; 3], [f32; 3], [f32, bf16, bf16], [f32, bf16, f32]] {
            assert!(can_reduce(types), "{types:?}");
        }
        for at in 0..3 {
            let mut types = [f32; 3];
            types[at] = f64;
            assert!(!can_reduce(types), "{types:?}");
        }
        let flex = DType::Flex32;
        assert!(!can_reduce([f32, flex, f32]) && !can_reduce([f32, f32, flex]));
    }

    #[test]
    fn quantized_types_are_neither_moved_nor_saved() {
        let dtype = DType::QFloat(QuantScheme::default());
        assert_eq!((moved_type(dtype), saved_type(dtype)), (None, None));
    }
}
