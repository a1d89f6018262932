//! Tensors as the handles that an interpreter of Burn's operations holds, and back. Nothing is copied.

use std::any::Any;

use burn::backend::{BackendTensor, DispatchKindConversion, DispatchTensor, Flex};
use burn_backend::TensorMetadata;
use burn_flex::FlexTensor;
use burn_ir::{BackendIr, HandleKind};

/// Returns the handle of a tensor of the CPU backend, if that is also the backend of the handle, and if the tensor has
/// its memory for itself, in the order of its dims. A view could hold much more memory than it has elements.
pub fn host_handle<B: BackendIr>(tensor: DispatchTensor) -> Option<HandleKind<B>> {
    match backend_tensor::<Flex>(tensor)? {
        BackendTensor::Float(tensor) => of_backend(tensor).map(HandleKind::Float),
        BackendTensor::Int(tensor) => of_backend(tensor).map(HandleKind::Int),
        BackendTensor::Bool(tensor) => of_backend(tensor).map(HandleKind::Bool),
        _ => None,
    }
}

/// Returns the handle of a tensor without autodiff, if it is on this backend and device.
pub fn device_handle<B: BackendIr>(
    tensor: DispatchTensor,
    device: &B::Device,
) -> Option<HandleKind<B>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let (on, handle) = match backend_tensor::<B>(tensor)? {
        BackendTensor::Float(tensor) => (tensor.device(), HandleKind::Float(tensor)),
        BackendTensor::Int(tensor) => (tensor.device(), HandleKind::Int(tensor)),
        BackendTensor::Bool(tensor) => (tensor.device(), HandleKind::Bool(tensor)),
        _ => return None,
    };
    (on == *device).then_some(handle)
}

/// Returns the tensor of a handle.
pub fn of_handle<B: BackendIr>(handle: HandleKind<B>) -> DispatchTensor
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::from_backend(match handle {
        HandleKind::Float(tensor) => BackendTensor::Float(tensor),
        HandleKind::Int(tensor) => BackendTensor::Int(tensor),
        HandleKind::Bool(tensor) => BackendTensor::Bool(tensor),
        HandleKind::Quantized(tensor) => BackendTensor::Quantized(tensor),
    })
}

fn backend_tensor<B: BackendIr>(tensor: DispatchTensor) -> Option<BackendTensor<B>>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    DispatchTensor::try_into_backend(tensor).ok()
}

fn of_backend<P: 'static>(tensor: FlexTensor) -> Option<P> {
    let num_bytes = tensor.shape().num_elements() * tensor.dtype().size();
    let offsets = tensor.layout().contiguous_offsets();
    if offsets.is_none_or(|(start, _)| start != 0) || tensor.bytes().len() != num_bytes {
        return None;
    }
    let tensor: Box<dyn Any> = Box::new(tensor);
    tensor.downcast().ok().map(|tensor| *tensor)
}
