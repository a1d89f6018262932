//! Tensors over bytes that collectives or files have delivered. Bytes are in the machine's order.

use burn::tensor::{AllocationProperty, Bytes, DType, Device, Shape, Tensor, TensorData};

/// Returns the elements in `buffer`, without copying them. The buffer stays alive as long as they are used.
///
/// # Panics
///
/// If the bytes are not those of `shape` in `dtype`.
pub fn data<B>(buffer: B, shape: impl Into<Shape>, dtype: DType) -> TensorData
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let bytes = bytes::Bytes::from_owner(buffer);
    let bytes = Bytes::from_shared(bytes, AllocationProperty::Native);
    TensorData::from_bytes(bytes, shape.into(), dtype)
}

/// Returns a flat tensor over the memory of `buffer`, which returns to its pool when the last view of the tensor is
/// dropped. A device with its own memory gets a copy.
///
/// # Panics
///
/// If the bytes are not whole elements of `dtype`.
pub fn tensor<B>(buffer: B, dtype: DType, device: &Device) -> Tensor<1>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    let len = buffer.as_ref().len() / dtype.size();
    Tensor::from_data(data(buffer, [len], dtype), (device, dtype))
}

/// Returns a flat tensor with its own memory.
///
/// # Panics
///
/// If the bytes are not whole elements of `dtype`.
pub fn owned(bytes: Vec<u8>, dtype: DType, device: &Device) -> Tensor<1> {
    let len = bytes.len() / dtype.size();
    let data = TensorData::from_bytes_vec(bytes, [len], dtype);
    Tensor::from_data(data, (device, dtype))
}
