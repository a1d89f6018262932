//! Bytes that a rank shows to its peers.

use std::fmt;
use std::sync::Arc;

use crate::{Label, Seal};

/// Shared, read-only bytes that an operation reads. Cheap to clone.
///
/// The owner of the bytes stays alive until the last clone is dropped, so that peers can read
/// them without ever touching freed memory. It must show the same bytes each time.
#[derive(Clone)]
pub struct Source {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// The checksum that the bytes have, and what they are, if they were sealed.
    seal: Option<Arc<(Seal, Label)>>,
}

impl Source {
    /// Makes a source of the bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::from_arc(Arc::new(owner))
    }

    /// Makes a source of the bytes of an owner that is shared already.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self { owner, seal: None }
    }

    /// Returns the source with the seal of its bytes: an operation that gives them looks whether they are still those, when it
    /// starts, or a gather of ranks that are threads when it reads them. If not, it is an
    /// [`Error::AlteredAtRest`](crate::Error::AlteredAtRest) of `what`. Without a seal it stays as it is.
    #[must_use]
    pub fn sealed(mut self, seal: Option<Seal>, what: impl FnOnce() -> Label) -> Self {
        self.seal = seal.map(|seal| Arc::new((seal, what())));
        self
    }

    pub(crate) fn seal(&self) -> Option<&Arc<(Seal, Label)>> {
        self.seal.as_ref()
    }

    /// Returns a source of no bytes.
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
