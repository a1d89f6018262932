//! Bytes in host or device memory.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;

/// The kind of memory that holds some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Space {
    /// Memory that the host reads and writes.
    Host,
    /// The memory of a device, such as a GPU.
    Device {
        /// The kind of the device, such as `cuda`.
        kind: &'static str,
        /// The number of the device among the devices of its kind.
        index: usize,
    },
}

/// Prints as `host memory` or `cuda:0`.
impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Device { kind, index } => write!(f, "{kind}:{index}"),
        }
    }
}

/// Bytes in some memory.
///
/// An engine that accepts a [space](Self::space) other than the host's downcasts to its own type with
/// [`as_any`](Self::as_any). The bytes must not change as long as the payload is shared.
pub trait Payload: Send + Sync {
    /// Returns the number of bytes, without reading them.
    fn len(&self) -> usize;

    /// Returns true if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that holds the bytes.
    fn space(&self) -> Space;

    /// Returns the bytes if they are in [`Space::Host`], and `None` otherwise.
    fn host(&self) -> Option<&[u8]>;

    /// Returns the bytes, copied to the host if they are elsewhere. Waits until they are computed.
    ///
    /// # Errors
    ///
    /// A description of the failure: the host cannot read this memory.
    fn read(&self) -> Result<Cow<'_, [u8]>, String> {
        let host = self.host().map(Cow::Borrowed);
        host.ok_or_else(|| format!("the host cannot read {}", self.space()))
    }

    /// Returns true if the threads of this process can read the bytes through a
    /// [`DeviceMemory`](crate::DeviceMemory).
    fn is_shared(&self) -> bool {
        false
    }

    /// Returns the payload as `Any`, for downcasting.
    fn as_any(&self) -> &dyn Any;
}

/// A point in the work that was enqueued on a device.
///
/// Work that needs the bytes written before the fence must wait for it on the device. Downcast it with
/// [`as_any`](Self::as_any).
pub trait Fence: fmt::Debug + Send + Sync {
    /// Returns true if all work before the fence is complete. Never waits.
    fn has_passed(&self) -> bool;

    /// Returns the fence as `Any`, for downcasting.
    fn as_any(&self) -> &dyn Any;
}
