//! Device names, as given on a command line.

use std::fmt;
use std::str::FromStr;

#[cfg(any(
    feature = "wgpu",
    feature = "vulkan",
    feature = "metal",
    feature = "webgpu"
))]
use burn::backend::{CubeDevice, DispatchDevice, WgpuDeviceKind};
use burn::tensor::{Device, DeviceType};
use thiserror::Error as ThisError;

/// The name of a device: a backend of Burn that this build has, and optionally a number.
///
/// ```
/// use burn_fsdp::DeviceName;
///
/// let name: DeviceName = "flex".parse()?;
/// let device = name.device(0)?;
/// # assert_eq!(device, burn::tensor::Device::flex());
/// # Ok::<(), burn_fsdp::Error>(())
/// ```
///
/// `flex` is the CPU. `wgpu`, `vulkan`, `metal`, `webgpu`, `cuda` and `rocm` are available in builds with the feature
/// of that name. `wgpu:1` is the machine's second `wgpu` device. Without a number, the machine's first rank gets its
/// first device, the second rank its second, and so on.
///
/// `auto` is the first backend of this build, in the order `cuda`, `rocm`, `metal`, `vulkan`, `webgpu`, `wgpu`, with a
/// device on this machine that is not a software device. If there is none, it is `flex`. Ranks share the devices of `auto`
/// if there are fewer devices than ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceName {
    backend: &'static str,
    number: Number,
}

/// The device of a rank among those of its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    /// Each rank has the device with its own number.
    OfRank,
    Given(usize),
    /// As `OfRank`, beginning again where devices run out: `auto`.
    InTurns,
}

/// An invalid or unavailable device name.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum DeviceNameError {
    /// A name that matches no backend.
    #[error(
        "{name:?} is not a device; give `auto`, or a backend ({}), optionally with a colon and a number, such as `wgpu:0`",
        BACKENDS.join(", ")
    )]
    Unknown {
        /// The name.
        name: String,
    },
    /// A backend that this build does not have.
    #[error(
        "this build has no {backend}: build with the feature `{backend}` of `burn-fsdp`, or build the command with \
         `--features burn-fsdp-cli/{backend}`; it has {}",
        built().join(", ")
    )]
    Feature {
        /// The backend.
        backend: &'static str,
    },
    /// A device number that this machine does not have.
    #[error(
        "there is no {backend} device {number} for rank {rank_here} of this machine, which has {found} (counted from \
         0); give a device for several ranks to share, such as `{backend}:0`, or start fewer ranks"
    )]
    Missing {
        /// The backend.
        backend: &'static str,
        /// The requested number.
        number: usize,
        /// The rank's number on its machine.
        rank_here: usize,
        /// The number of devices found.
        found: usize,
    },
}

const BACKENDS: [&str; 7] = ["flex", "wgpu", "vulkan", "metal", "webgpu", "cuda", "rocm"];

/// The name of a device that this machine has.
const AUTO: &str = "auto";

/// The backends of accelerators, the preferred ones first.
const ACCELERATORS: [&str; 6] = ["cuda", "rocm", "metal", "vulkan", "webgpu", "wgpu"];

/// Returns Burn's key for listing a backend's devices; `None` if this build does not have the backend.
fn device_type(backend: &str) -> Option<DeviceType> {
    match backend {
        "flex" => Some(DeviceType::Flex),
        #[cfg(feature = "wgpu")]
        "wgpu" => Some(DeviceType::Wgpu),
        #[cfg(feature = "vulkan")]
        "vulkan" => Some(DeviceType::Vulkan),
        #[cfg(feature = "metal")]
        "metal" => Some(DeviceType::Metal),
        #[cfg(feature = "webgpu")]
        "webgpu" => Some(DeviceType::WebGpu),
        #[cfg(feature = "cuda")]
        "cuda" => Some(DeviceType::Cuda),
        #[cfg(feature = "rocm")]
        "rocm" => Some(DeviceType::Rocm),
        _ => None,
    }
}

/// Returns the backends of this build.
fn built() -> Vec<&'static str> {
    let is_built = |backend: &&str| device_type(backend).is_some();
    BACKENDS.into_iter().filter(is_built).collect()
}

impl Default for DeviceName {
    fn default() -> Self {
        Self {
            backend: "flex",
            number: Number::OfRank,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Number::OfRank => f.write_str(self.backend),
            Number::Given(number) => write!(f, "{}:{number}", self.backend),
            Number::InTurns => f.write_str(AUTO),
        }
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(name: &str) -> Result<Self, DeviceNameError> {
        let unknown = || DeviceNameError::Unknown {
            name: name.to_owned(),
        };
        if name == AUTO {
            return Ok(Self::auto());
        }
        let (backend, number) = match name.split_once(':') {
            Some((backend, number)) => (backend, Some(number)),
            None => (name, None),
        };
        let known = BACKENDS.into_iter().find(|known| *known == backend);
        let backend = known.ok_or_else(unknown)?;
        let number = number.map(|number| number.parse::<usize>().map_err(|_| unknown()));
        let number = number.transpose()?.map_or(Number::OfRank, Number::Given);
        if device_type(backend).is_none() {
            return Err(DeviceNameError::Feature { backend });
        }
        Ok(Self { backend, number })
    }
}

impl DeviceName {
    /// Returns the name `auto`, with the backend that it has on this machine.
    fn auto() -> Self {
        let has_one = |backend: &&str| {
            let found = devices(backend);
            found.iter().any(|device| !is_software(device))
        };
        Self {
            backend: ACCELERATORS.into_iter().find(has_one).unwrap_or("flex"),
            number: Number::InTurns,
        }
    }

    /// Returns true for the CPU backend, whose memory collectives read in place.
    pub fn is_host(&self) -> bool {
        self.backend == "flex"
    }

    /// Returns the device, without autodiff, for the rank with this number on its machine. Lists devices without
    /// starting them.
    ///
    /// # Errors
    ///
    /// [`DeviceNameError::Missing`] if the machine does not have a device of that number.
    pub fn device(&self, rank_here: usize) -> Result<Device, DeviceNameError> {
        let found = devices(self.backend);
        let number = match self.number {
            Number::Given(number) => number,
            // All ranks share the CPU.
            Number::OfRank if self.is_host() => 0,
            Number::OfRank => rank_here,
            Number::InTurns => rank_here % found.len().max(1),
        };
        found.get(number).cloned().ok_or(DeviceNameError::Missing {
            backend: self.backend,
            number,
            rank_here,
            found: found.len(),
        })
    }
}

/// Returns the devices of a backend on this machine; software devices are returned only if there are no others.
fn devices(backend: &str) -> Vec<Device> {
    let found = device_type(backend).map(Device::enumerate);
    let mut devices: Vec<Device> = found.into_iter().flatten().collect();
    if devices.iter().any(|device| !is_software(device)) {
        devices.retain(|device| !is_software(device));
    }
    devices
}

/// Returns true if this is a graphics driver that computes on the CPU.
fn is_software(device: &Device) -> bool {
    #[cfg(any(
        feature = "wgpu",
        feature = "vulkan",
        feature = "metal",
        feature = "webgpu"
    ))]
    if let DispatchDevice::Cube(CubeDevice::Wgpu(device)) = device.as_dispatch() {
        return device.kind == WgpuDeviceKind::Cpu;
    }
    let _ = device;
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for name in ["flex", "flex:0"] {
            let read: DeviceName = name.parse().expect("a name");
            assert_eq!(read.to_string(), name);
            assert_eq!(read.device(3), Ok(Device::flex()));
        }
        let second: DeviceName = "flex:1".parse().expect("a name");
        assert!(second.device(0).is_err(), "there is one CPU");
        for name in ["", "gpu", "wgpu:", "wgpu:x", "flex:-1", "flex:0:0", "Flex"] {
            let error = name.parse::<DeviceName>().expect_err(name).to_string();
            assert!(error.contains("is not a device"), "{error}");
        }
    }

    /// Whatever this machine has, ranks share it in turns, and a software device is not chosen.
    #[test]
    fn auto_finds_a_device_for_every_rank() {
        let auto: DeviceName = "auto".parse().expect("a name");
        assert_eq!(auto.to_string(), "auto");
        let first = auto.device(0).expect("there is a CPU");
        assert!(!is_software(&first));
        let number = devices(auto.backend).len();
        assert_eq!(auto.device(number), Ok(first.clone()));
        assert_eq!(auto.is_host(), first == Device::flex());
        let names = ["auto:0", "Auto"].map(|name| name.parse::<DeviceName>());
        assert!(names.iter().all(Result::is_err));
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_backend_that_is_not_built_names_its_feature() {
        let error = "cuda:1".parse::<DeviceName>().expect_err("not built");
        assert_eq!(error, DeviceNameError::Feature { backend: "cuda" });
        assert!(error.to_string().contains("feature `cuda`"), "{error}");
    }

    #[test]
    #[cfg(feature = "wgpu")]
    fn a_missing_device_is_reported() {
        let name: DeviceName = "wgpu:999".parse().expect("a name");
        let error = name.device(1).expect_err("nobody has so many").to_string();
        assert!(error.contains("no wgpu device 999 for rank 1"), "{error}");
        assert!(error.contains("`wgpu:0`"), "{error}");
    }
}
