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
    /// The bytes of `owner`, such as a [`Buffer`](crate::Buffer) or a `Vec<u8>`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self(Arc::new(owner))
    }

    /// The bytes of an owner that is shared already.
    pub fn from_arc(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self(owner)
    }

    /// No bytes.
    pub fn empty() -> Self {
        Self::new([])
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.as_bytes().len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({} bytes)", self.len())
    }
}
