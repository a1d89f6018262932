//! Copies between a device's memory and the host's, where collectives move bytes.

use std::fmt;
use std::iter::Sum;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Tensor};
use burn_fsdp_collectives::{Account, Source};
use burn_ir::{BackendIr, HandleKind};

use crate::host::{is_host, is_host_backend};
use crate::lend::{self, first_of, read};
use crate::take;

/// Copies between the host and devices with their own memory, made in forward and backward for gathers, reductions and
/// offloaded values. The CPU backend makes none, because its memory is the host's. Copies for sharding itself,
/// checkpoints, records and whole states are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Staged {
    /// Shards and gradients read back for sending, and inputs of regions that wait on the host.
    pub to_host: Transfers,
    /// Full parameters and reduced gradients copied to the device, and inputs of regions that return to it.
    pub to_device: Transfers,
}

/// A number of copies, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Transfers {
    /// The number of copies.
    pub number: usize,
    /// The total bytes copied.
    pub bytes: usize,
}

impl fmt::Display for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B in {} copies", self.bytes, self.number)
    }
}

impl AddAssign for Transfers {
    fn add_assign(&mut self, other: Self) {
        self.number += other.number;
        self.bytes += other.bytes;
    }
}

impl Sum for Staged {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum.to_host += one.to_host;
            sum.to_device += one.to_device;
            sum
        })
    }
}

/// Moves tensors between a device and the host, and counts the copies.
#[derive(Debug, Default)]
pub struct Staging {
    to_host: Counter,
    to_device: Counter,
}

#[derive(Debug, Default)]
struct Counter {
    number: AtomicUsize,
    bytes: AtomicUsize,
}

impl Counter {
    fn add(&self, bytes: usize) {
        self.number.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> Transfers {
        Transfers {
            number: self.number.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

impl Staging {
    /// Returns the copies so far.
    pub fn staged(&self) -> Staged {
        Staged {
            to_host: self.to_host.get(),
            to_device: self.to_device.get(),
        }
    }

    /// Returns a flat tensor's elements, as [`source`](crate::source) does.
    pub fn source(&self, tensor: Tensor<1>, account: Option<Account>) -> Source {
        let is_copied = !is_host(&tensor.device());
        let source = lend::source(tensor, account);
        if is_copied {
            self.to_host.add(source.len());
        }
        source
    }

    /// Returns a flat tensor over a buffer, as [`tensor`](crate::tensor) does.
    pub fn tensor<B>(&self, buffer: B, dtype: DType, device: &Device) -> Tensor<1>
    where
        B: AsRef<[u8]> + Send + Sync + 'static,
    {
        self.arrives(buffer.as_ref().len(), device);
        take::tensor(buffer, dtype, device)
    }

    /// Returns a flat tensor with its own memory, as [`owned`](crate::owned) does.
    pub fn owned(&self, bytes: Vec<u8>, dtype: DType, device: &Device) -> Tensor<1> {
        self.arrives(bytes.len(), device);
        take::owned(bytes, dtype, device)
    }

    /// Returns the tensor on `device`, copied if necessary.
    pub fn moved<const D: usize, K: Basic>(
        &self,
        tensor: Tensor<D, K>,
        device: &Device,
    ) -> Tensor<D, K> {
        let num_bytes = tensor.shape().num_elements() * tensor.dtype().size();
        if is_host(&tensor.device()) {
            self.arrives(num_bytes, device);
        } else if is_host(device) {
            self.to_host.add(num_bytes);
        }
        tensor.to_device(device)
    }

    /// Makes a device execute its deferred work, to free dropped full weights before others arrive. A device error
    /// surfaces where its results are read.
    pub fn make_room(&self, device: &Device) {
        if !is_host(device) {
            let _ = device.clone().without_autodiff().flush();
        }
    }

    /// Returns the first `num_bytes` bytes of a tensor that is not in host memory, in the order of its dims.
    ///
    /// # Errors
    ///
    /// A description of the failure, if the backend cannot be read.
    pub fn read_back<B: BackendIr>(
        &self,
        tensor: HandleKind<B>,
        num_bytes: usize,
    ) -> Result<Source, String> {
        let source = first_of(read::<B>(tensor)?, num_bytes, None);
        self.to_host.add(num_bytes);
        Ok(source)
    }

    /// Counts a copy to a device of `B`, unless `B` is the CPU backend, which uses received bytes in place.
    pub fn arrives_on<B: BackendIr>(&self, num_bytes: usize) {
        if !is_host_backend::<B>() {
            self.to_device.add(num_bytes);
        }
    }

    fn arrives(&self, num_bytes: usize, device: &Device) {
        if num_bytes > 0 && !is_host(device) {
            self.to_device.add(num_bytes);
        }
    }
}
