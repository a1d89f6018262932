//! Properties of devices: support for the engine's operations, memory on the host, autodiff.

use burn::backend::DispatchDevice;
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};

use crate::error::Error;

/// The backends other than Flex that support the operations, with the features that add them.
const OPTIONAL_BACKENDS: [(&str, &[&str]); 3] = [
    (
        "Cube",
        &["wgpu", "vulkan", "metal", "webgpu", "cuda", "rocm"],
    ),
    ("LibTorch", &["tch"]),
    ("NdArray", &["ndarray"]),
];

/// Rejects a device whose backend lacks the engine's operations.
pub(crate) fn check_backend(path: &str, device: &Device) -> Result<(), Error> {
    let plain = device.clone().without_autodiff();
    let backend = match plain.as_dispatch() {
        DispatchDevice::Flex(_) => return Ok(()),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => return Ok(()),
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(_) => return Ok(()),
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => return Ok(()),
        // Unreachable if no other backend is compiled in.
        #[allow(unreachable_patterns)]
        other => format!("{other:?}"),
    };
    let letters = backend.chars().take_while(|c| c.is_alphanumeric());
    let backend: String = letters.collect();
    let known = OPTIONAL_BACKENDS.iter().find(|(name, _)| *name == backend);
    Err(Error::Backend {
        path: path.to_owned(),
        advice: match known {
            Some((_, features)) => format!(
                "enable the `burn-fsdp` feature for this device, one of {}",
                quoted(features.iter())
            ),
            None => format!(
                "build the module on `Device::flex()`, or on a device of one of the `burn-fsdp` features {}",
                quoted(OPTIONAL_BACKENDS.iter().flat_map(|(_, features)| *features))
            ),
        },
        backend,
    })
}

fn quoted<'a>(names: impl Iterator<Item = &'a &'a str>) -> String {
    let quoted: Vec<_> = names.map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

/// Returns true if values on the two devices can be in one graph.
pub(crate) fn is_same_backend(one: &Device, other: &Device) -> bool {
    let [one, other] = [one, other].map(|device| device.clone().without_autodiff());
    std::mem::discriminant(one.as_dispatch()) == std::mem::discriminant(other.as_dispatch())
}

/// Returns true if `device` records operations without computing.
pub(crate) fn is_capture(device: &Device) -> bool {
    let plain = device.clone().without_autodiff();
    // By name, because builds without compiled steps lack the backend.
    format!("{:?}", plain.as_dispatch()).starts_with("Capture")
}

/// Returns `device` with the same form of autodiff as `source`, or without if `source` has none.
pub(crate) fn alike(device: &Device, source: &Device) -> Device {
    let plain = device.clone().without_autodiff();
    match source.gradient_checkpointing_strategy() {
        None => plain,
        Some(GradientCheckpointingStrategy::Balanced) => plain.autodiff().gradient_checkpointing(),
        Some(GradientCheckpointingStrategy::Disabled) => plain.autodiff(),
    }
}

/// Returns the plain `tensor`, untracked, with the autodiff of `device` if it has one.
pub(crate) fn tracked<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}
