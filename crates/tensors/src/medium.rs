//! The memory in which the tensors of one collective are exchanged.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_collectives::{Account, Buffer, BufferPool, ProcessGroup, Source};

use crate::device::{device_buffer, device_source, device_tensor, exchanges_on_devices};
use crate::element::cast;
use crate::host::is_host;
use crate::staging::Staging;

/// The memory in which the flat floats of one collective are exchanged. All bytes of a collective are in the same one.
#[derive(Debug, Clone)]
pub enum Medium {
    /// Memory of the host. Tensors of other devices are copied, which [`Staging`] counts.
    Host,
    /// The memory of a device, without autodiff.
    Device(Device),
}

impl Medium {
    /// Returns the medium for tensors on these devices: their common device, if the ranks of `group` can exchange bytes
    /// there, and this one was started by [`launch`](crate::launch()).
    pub fn of(group: &ProcessGroup, devices: impl IntoIterator<Item = Device>) -> Self {
        if !exchanges_on_devices(group) {
            return Self::Host;
        }
        let mut devices = devices.into_iter().map(Device::without_autodiff);
        let Some(first) = devices.next().filter(|first| !is_host(first)) else {
            return Self::Host;
        };
        if devices.all(|device| device == first) {
            Self::Device(first)
        } else {
            Self::Host
        }
    }

    /// Lends the elements of a flat tensor without autodiff. The `account` counts the bytes until no rank reads them
    /// anymore.
    pub fn source(&self, staging: &Staging, tensor: Tensor<1>, account: Option<Account>) -> Source {
        let Self::Device(device) = self else {
            return staging.source(tensor, account);
        };
        let tensor = if tensor.device() == *device {
            tensor
        } else {
            staging.moved(tensor, device)
        };
        let dtype = exchanged(tensor.dtype());
        let tensor = cast(tensor, dtype);
        let [len] = tensor.dims();
        device_source::<Dispatch>(tensor.into_dispatch(), len, account)
    }

    /// Lends zeros.
    pub fn zeros(&self, num_elements: usize, dtype: DType) -> Source {
        match self {
            Self::Host => Source::new(vec![0; num_elements * dtype.size()]),
            Self::Device(device) => {
                let dtype = exchanged(dtype);
                let zeros = Tensor::<1>::zeros([num_elements], (device, dtype));
                device_source::<Dispatch>(zeros.into_dispatch(), num_elements, None)
            }
        }
    }

    /// Returns a buffer for `len` bytes of results, from `pool` on the host.
    pub fn buffer(&self, pool: &BufferPool, len: usize) -> Buffer {
        match self {
            Self::Host => pool.take(len),
            Self::Device(device) => device_buffer::<Dispatch>(device.as_dispatch(), len),
        }
    }
}

/// Returns the type in which elements of `dtype` are exchanged.
fn exchanged(dtype: DType) -> DType {
    match dtype {
        DType::Flex32 => DType::F32,
        other => other,
    }
}

/// Returns the flat tensor in a buffer of a [`Medium::Device`], as elements of `dtype`.
///
/// # Errors
///
/// The buffer itself, if it is in host memory.
pub fn arrived(buffer: Buffer, dtype: DType) -> Result<Tensor<1>, Buffer> {
    let tensor: Tensor<1> = device_tensor::<Dispatch>(buffer).map(Tensor::from_dispatch)?;
    Ok(cast(tensor, dtype))
}
