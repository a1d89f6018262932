//! Bytes that a rank shows to its peers.

use std::fmt;
use std::sync::Arc;

/// Shared, read-only bytes that an operation reads. Cheap to clone.
///
/// The owner of the bytes stays alive until the last clone is dropped, so that peers can read
/// them without ever touching freed memory. It must show the same bytes each time.
#[derive(Clone)]
pub struct Source(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl Source {
    /// Makes a source of the bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Arc::new(owner))
    }

    /// Makes a source of the bytes of an owner that is shared already.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self(owner)
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
        (*self.0).as_ref()
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({} bytes)", self.len())
    }
}
