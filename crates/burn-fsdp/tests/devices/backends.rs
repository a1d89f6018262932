//! The backends under test.

use burn::backend::{DispatchDevice, Flex};
use burn::tensor::Device;
use burn_fsdp::internals::compile::BackendIr;

#[cfg(feature = "ndarray")]
#[allow(deprecated, reason = "there is no other second backend on the CPU")]
pub(crate) type NdArray = burn::backend::NdArray;

/// A backend of compiled steps, with its device.
pub(crate) trait Tested: BackendIr {
    /// The largest relative difference of a loss from the loss on Flex.
    const TOLERANCE: f32;

    /// Returns the device, without autodiff.
    fn device() -> Device;

    /// Returns the same device in the backend's type.
    fn own() -> Self::Device;
}

impl Tested for Flex {
    const TOLERANCE: f32 = 1e-5;

    fn device() -> Device {
        Device::flex()
    }

    fn own() -> Self::Device {
        Default::default()
    }
}

#[cfg(feature = "ndarray")]
impl Tested for NdArray {
    const TOLERANCE: f32 = 1e-5;

    #[allow(deprecated, reason = "there is no other second backend on the CPU")]
    fn device() -> Device {
        Device::ndarray()
    }

    fn own() -> Self::Device {
        match Self::device().as_dispatch() {
            DispatchDevice::NdArray(device) => *device,
            other => panic!("{other:?} is not a device of NdArray"),
        }
    }
}

#[cfg(feature = "wgpu")]
impl Tested for burn::backend::Cube {
    const TOLERANCE: f32 = 1e-4;

    fn device() -> Device {
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)
    }

    fn own() -> Self::Device {
        match Self::device().as_dispatch() {
            DispatchDevice::Cube(device) => device.clone(),
            other => panic!("{other:?} is not a device of CubeCL"),
        }
    }
}
