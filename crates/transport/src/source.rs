//! Bytes that a rank shows to its peers.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::payload::{Payload, Space};
use burn_fsdp_rendezvous::{Label, Seal};

/// Shared, read-only bytes that an operation reads. Cheap to clone.
///
/// The owner of the bytes stays alive until the last clone is dropped, so peers never read freed memory. The owner must
/// return the same bytes each time.
#[derive(Clone)]
pub struct Source {
    payload: Arc<dyn Payload>,
    /// The seal of the bytes and a description of them, if they were sealed.
    seal: Option<Arc<(Seal, Label)>>,
}

/// The owner of bytes in host memory.
struct Host<T>(T);

impl<T: AsRef<[u8]> + Send + Sync + 'static> Payload for Host<T> {
    fn len(&self) -> usize {
        self.0.as_ref().len()
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn host(&self) -> Option<&[u8]> {
        Some(self.0.as_ref())
    }

    fn as_any(&self) -> &dyn Any {
        &self.0
    }
}

/// An owner that was shared before it became a payload.
struct Shared(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl Source {
    /// Makes a source of the bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`, in host memory.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::of(Arc::new(Host(owner)))
    }

    /// Makes a source of the bytes of an owner that is already shared.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self::new(Shared(owner))
    }

    /// Makes a source of bytes in any memory that the group's engine takes.
    pub fn of(payload: Arc<dyn Payload>) -> Self {
        Self {
            payload,
            seal: None,
        }
    }

    /// Returns the source with the seal of its bytes. An operation that gives the bytes checks them against the seal
    /// when it starts; a gather between threads checks when it reads them. A difference is an
    /// [`Error::AlteredAtRest`](burn_fsdp_rendezvous::Error::AlteredAtRest) that names `what`. Without a seal the source stays as it
    /// is.
    #[must_use]
    pub fn sealed(mut self, seal: Option<Seal>, what: impl FnOnce() -> Label) -> Self {
        self.seal = seal.map(|seal| Arc::new((seal, what())));
        self
    }

    /// Returns the seal of the bytes and a description of them, if they were sealed.
    pub fn seal(&self) -> Option<&Arc<(Seal, Label)>> {
        self.seal.as_ref()
    }

    /// Returns a source without bytes.
    pub fn empty() -> Self {
        Self::new([])
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.payload.len()
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory in which the bytes are.
    pub fn space(&self) -> Space {
        self.payload.space()
    }

    /// Returns the payload.
    pub fn payload(&self) -> &Arc<dyn Payload> {
        &self.payload
    }

    /// Returns the bytes if they are in host memory.
    pub fn host(&self) -> Option<&[u8]> {
        self.payload.host()
    }

    /// Returns the bytes.
    ///
    /// # Panics
    ///
    /// If they are not in host memory. No engine gets such a source unless it [takes](crate::Engine::takes) the space.
    pub fn as_bytes(&self) -> &[u8] {
        let bytes = self.host();
        bytes.unwrap_or_else(|| panic!("the bytes are in {}, not in host memory", self.space()))
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({} bytes)", self.len())
    }
}
