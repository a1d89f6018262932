//! Tensors with the properties of others: element type, device, training state.

use burn::tensor::{Bool, Int, Tensor, TensorData};
pub(crate) use burn_fsdp_tensors::cast;
use burn_fsdp_tensors::is_host;

/// Returns a copy of the elements of `tensor`, a part of a larger one, in memory of its own on the same device.
pub(crate) fn copied(tensor: Tensor<1>) -> Tensor<1> {
    let ([len], dtype, device) = (tensor.dims(), tensor.dtype(), tensor.device());
    if is_host(&device) || len == 0 {
        return Tensor::from_data(tensor.into_data(), (&device, dtype));
    }
    Tensor::empty([len], (&device, dtype)).slice_assign(0..len, tensor)
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
