//! Converts tensors to and from the bytes that collectives move.

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bool, Bytes, DType, Device, Int, Shape, Tensor, TensorData};
use burn_fsdp_collectives::{Account, ElementType, Source};

/// Returns the transport's type for a float type, if it can be reduced.
pub(crate) fn element_type(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::F64 => Some(ElementType::F64),
        DType::F32 | DType::Flex32 => Some(ElementType::F32),
        DType::F16 => Some(ElementType::F16),
        DType::BF16 => Some(ElementType::BF16),
        _ => None,
    }
}

/// Returns `tensor` in `dtype`; the same tensor if it already has that type.
pub(crate) fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => tensor.cast(dtype),
    }
}

/// The bytes of a tensor of the CPU backend, read in place.
struct FlexBytes {
    tensor: FloatTensor<Flex>,
    start: usize,
    end: usize,
    /// Counts the bytes as unsharded as long as a rank may still read them.
    _account: Option<Account>,
}

impl AsRef<[u8]> for FlexBytes {
    fn as_ref(&self) -> &[u8] {
        &self.tensor.bytes()[self.start..self.end]
    }
}

/// Shares the elements of a flat tensor without autodiff. The CPU backend copies nothing; other devices are read back.
pub(crate) fn source(tensor: Tensor<1>, account: Option<Account>) -> Source {
    debug_assert!(!tensor.is_autodiff(), "transport takes plain tensors");
    let size = tensor.dtype().size();
    match tensor.clone().try_into_primitive::<Flex>() {
        Ok(primitive) => {
            drop(tensor);
            let primitive = match primitive.layout().contiguous_offsets() {
                Some(_) => primitive,
                None => primitive.to_contiguous(),
            };
            let (start, end) = primitive
                .layout()
                .contiguous_offsets()
                .expect("a contiguous tensor has contiguous offsets");
            Source::new(FlexBytes {
                start: start * size,
                end: end * size,
                tensor: primitive,
                _account: account,
            })
        }
        Err(_) => Source::new(HostBytes {
            data: tensor.into_data(),
            _account: account,
        }),
    }
}

/// Returns a source that shares data on the host.
pub(crate) fn host(data: TensorData) -> Source {
    Source::new(HostBytes {
        data,
        _account: None,
    })
}

/// The bytes of a tensor of another device, read back.
struct HostBytes {
    data: TensorData,
    _account: Option<Account>,
}

impl AsRef<[u8]> for HostBytes {
    fn as_ref(&self) -> &[u8] {
        self.data.as_bytes()
    }
}

/// Returns a flat tensor over the memory of `buffer`, which returns to its pool when the last view of the tensor is
/// dropped.
pub(crate) fn tensor<B>(buffer: B, dtype: DType, device: &Device) -> Tensor<1>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let len = buffer.as_ref().len() / dtype.size();
    Tensor::from_data(data(buffer, [len], dtype), (device, dtype))
}

/// Returns the elements in `buffer`, and keeps it alive as long as they are used.
pub(crate) fn data<B>(buffer: B, shape: impl Into<Shape>, dtype: DType) -> TensorData
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let bytes = Bytes::from_shared(
        bytes::Bytes::from_owner(buffer),
        burn::tensor::AllocationProperty::Native,
    );
    TensorData::from_bytes(bytes, shape.into(), dtype)
}

/// Returns a flat tensor with its own memory.
pub(crate) fn owned(bytes: Vec<u8>, dtype: DType, device: &Device) -> Tensor<1> {
    let len = bytes.len() / dtype.size();
    Tensor::from_data(owned_data(bytes, [len], dtype), (device, dtype))
}

/// Returns elements with their own memory.
pub(crate) fn owned_data(bytes: Vec<u8>, shape: impl Into<Shape>, dtype: DType) -> TensorData {
    TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape.into(), dtype)
}

/// Returns a leaf with the elements of `data`, and the element type, device and training state of `old`.
pub(crate) fn in_place_of<const D: usize>(old: &Tensor<D>, data: TensorData) -> Tensor<D> {
    let new = Tensor::from_data(data, (&old.device(), old.dtype()));
    new.set_require_grad(old.is_require_grad())
}

/// Returns a tensor with the elements of `data`, and the element type and device of `old`.
pub(crate) fn int_in_place_of<const D: usize>(
    old: &Tensor<D, Int>,
    data: TensorData,
) -> Tensor<D, Int> {
    Tensor::from_data(data, (&old.device(), old.dtype()))
}

/// Returns a tensor with the elements of `data` on the device of `old`.
pub(crate) fn bool_in_place_of<const D: usize>(
    old: &Tensor<D, Bool>,
    data: TensorData,
) -> Tensor<D, Bool> {
    Tensor::from_data(data, &old.device())
}
