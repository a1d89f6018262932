//! Tensors in the host's memory.

use std::any::{Any, TypeId};

use burn::backend::{DispatchDevice, Flex};
use burn::tensor::Device;
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
