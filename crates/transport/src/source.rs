//! Bytes that a rank lets its peers read.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::payload::{Payload, Space};

/// Shared, read-only bytes that an operation reads. Cheap to clone.
///
/// The owner of the bytes stays alive until the last clone is dropped, so peers never read freed memory. The owner must
/// return the same bytes each time.
#[derive(Clone)]
pub struct Source {
    owner: Owner,
    /// What the rank knows about the bytes. Engines pass it on and never read it.
    note: Option<Arc<dyn Any + Send + Sync>>,
}

#[derive(Clone)]
enum Owner {
    /// Host memory, not wrapped in a payload because that would cost an allocation for each part of each operation.
    Host(Arc<dyn AsRef<[u8]> + Send + Sync>),
    Payload(Arc<dyn Payload>),
}

impl Source {
    /// Creates a source from the bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`, in host memory.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::from_arc(Arc::new(owner))
    }

    /// Creates a source from the bytes of an owner that is already shared, in host memory.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let owner = Owner::Host(owner);
        Self { owner, note: None }
    }

    /// Creates a source from bytes in any memory that the group's engine accepts.
    pub fn of(payload: Arc<dyn Payload>) -> Self {
        let owner = Owner::Payload(payload);
        Self { owner, note: None }
    }

    /// Attaches what the rank knows about the bytes, such as their seal; `None` removes it. Engines pass it on with
    /// the source and never read it.
    #[must_use]
    pub fn noted<T: Any + Send + Sync>(mut self, note: Option<Arc<T>>) -> Self {
        self.note = note.map(|note| note as Arc<dyn Any + Send + Sync>);
        self
    }

    /// Returns the attached note, if it has this type.
    #[inline]
    pub fn note<T: Any>(&self) -> Option<&T> {
        self.note.as_deref()?.downcast_ref()
    }

    /// Returns a source without bytes.
    pub fn empty() -> Self {
        Self::new([])
    }

    /// Returns the number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.owner {
            Owner::Host(owner) => (**owner).as_ref().len(),
            Owner::Payload(payload) => payload.len(),
        }
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that holds the bytes.
    #[inline]
    pub fn space(&self) -> Space {
        match &self.owner {
            Owner::Host(_) => Space::Host,
            Owner::Payload(payload) => payload.space(),
        }
    }

    /// Returns the bytes if they are in host memory.
    #[inline]
    pub fn host(&self) -> Option<&[u8]> {
        match &self.owner {
            Owner::Host(owner) => Some((**owner).as_ref()),
            Owner::Payload(payload) => payload.host(),
        }
    }

    /// Returns the payload that the source was [created from](Self::of); `None` if it was created from an owner.
    pub fn payload(&self) -> Option<&dyn Payload> {
        match &self.owner {
            Owner::Host(_) => None,
            Owner::Payload(payload) => Some(&**payload),
        }
    }

    /// Returns the bytes, copied to the host if they are elsewhere. Waits until they are computed.
    ///
    /// # Errors
    ///
    /// A description of the failure: the host cannot read this memory.
    pub fn read(&self) -> Result<Cow<'_, [u8]>, String> {
        match &self.owner {
            Owner::Host(owner) => Ok(Cow::Borrowed((**owner).as_ref())),
            Owner::Payload(payload) => payload.read(),
        }
    }

    /// Returns the bytes.
    ///
    /// # Panics
    ///
    /// If they are not in host memory. An engine receives such a source only if it [takes](crate::Engine::takes) the
    /// space.
    #[inline]
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
