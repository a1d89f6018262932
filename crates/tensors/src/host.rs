//! Tensors in the host's memory.

use std::any::{Any, TypeId};

use burn::backend::{DispatchDevice, Flex};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_backend::TensorMetadata;
use burn_flex::FlexTensor;
use burn_ir::{BackendIr, HandleKind};

/// Returns true if `device` is the CPU backend, whose memory collectives read in place.
pub fn is_host(device: &Device) -> bool {
    let plain = device.clone().without_autodiff();
    matches!(plain.as_dispatch(), DispatchDevice::Flex(_))
}

/// Returns true if `B` is the CPU backend.
pub fn is_host_backend<B: BackendIr>() -> bool {
    TypeId::of::<B>() == TypeId::of::<Flex>()
}

/// Returns a tensor of the CPU backend as a float tensor of any backend, if that is the CPU backend and the tensor is no
/// view.
pub fn host_float<B: BackendIr, const D: usize>(tensor: &Tensor<D>) -> Option<HandleKind<B>> {
    let own = tensor.clone().try_into_primitive::<Flex>().ok()?;
    of_backend(own).map(HandleKind::Float)
}

/// Returns a tensor of the CPU backend as an int tensor of any backend, if that is the CPU backend and the tensor is no
/// view.
pub fn host_int<B: BackendIr, const D: usize>(tensor: &Tensor<D, Int>) -> Option<HandleKind<B>> {
    let own = tensor.clone().try_into_primitive::<Flex>().ok()?;
    of_backend(own).map(HandleKind::Int)
}

/// Returns a tensor of the CPU backend as a bool tensor of any backend, if that is the CPU backend and the tensor is no
/// view.
pub fn host_bool<B: BackendIr, const D: usize>(tensor: &Tensor<D, Bool>) -> Option<HandleKind<B>> {
    let own = tensor.clone().try_into_primitive::<Flex>().ok()?;
    of_backend(own).map(HandleKind::Bool)
}

/// Returns a tensor that has its memory for itself, in the order of its dims. A view could hold much more memory than it
/// has elements.
fn of_backend<P: 'static>(tensor: FlexTensor) -> Option<P> {
    let num_bytes = tensor.shape().num_elements() * tensor.dtype().size();
    let offsets = tensor.layout().contiguous_offsets();
    if offsets.is_none_or(|(start, _)| start != 0) || tensor.bytes().len() != num_bytes {
        return None;
    }
    let tensor: Box<dyn Any> = Box::new(tensor);
    tensor.downcast().ok().map(|tensor| *tensor)
}

/// Returns a tensor of any backend as a tensor of the CPU backend, if it is one.
pub fn on_host<B: BackendIr>(tensor: &HandleKind<B>) -> Option<&FlexTensor> {
    let tensor: &dyn Any = match tensor {
        HandleKind::Float(tensor) => tensor,
        HandleKind::Int(tensor) => tensor,
        HandleKind::Bool(tensor) => tensor,
        HandleKind::Quantized(_) => return None,
    };
    tensor.downcast_ref()
}
