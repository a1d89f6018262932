//! Bytes that a rank exposes to its peers.

use std::fmt;
use std::sync::Arc;

use crate::{Label, Seal};

/// Shared, read-only bytes that an operation reads. Cheap to clone.
///
/// The owner of the bytes stays alive until the last clone is dropped, so peers never read freed memory. The owner must
/// return the same bytes each time.
#[derive(Clone)]
pub struct Source {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// The seal of the bytes and a description of them, if they were sealed.
    seal: Option<Arc<(Seal, Label)>>,
}

impl Source {
    /// Creates a source of the bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::from_arc(Arc::new(owner))
    }

    /// Creates a source of the bytes of an owner that is already shared.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self { owner, seal: None }
    }

    /// Returns the source with the seal of its bytes. An operation that sends the bytes checks them against the seal
    /// when it starts; a gather between threads checks when it reads them. A difference is an
    /// [`Error::AlteredAtRest`](crate::Error::AlteredAtRest) that names `what`. Without a seal the source stays
    /// unchanged.
    #[must_use]
    pub fn sealed(mut self, seal: Option<Seal>, what: impl FnOnce() -> Label) -> Self {
        self.seal = seal.map(|seal| Arc::new((seal, what())));
        self
    }

    pub(crate) fn seal(&self) -> Option<&Arc<(Seal, Label)>> {
        self.seal.as_ref()
    }

    /// Returns a source without bytes.
    pub fn empty() -> Self {
        Self::new([])
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.as_bytes().len()
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        (*self.owner).as_ref()
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({} bytes)", self.len())
    }
}
