//! Where the bytes to save come from.

use std::collections::HashMap;
use std::fmt;

use crate::error::BoxError;
use crate::{Region, TensorSpec};

/// The bytes of one part: little-endian elements in row-major order.
pub type PartBytes<'a> = Box<dyn AsRef<[u8]> + Send + Sync + 'a>;

/// Hands out the parts that a rank holds, one at a time, each at most once in a save.
///
/// Any function `FnMut(&TensorSpec, &Region) -> Result<Vec<u8>, BoxError>` is one.
pub trait Source {
    /// The elements of `region`, without padding. The part is dropped as soon as it is written.
    ///
    /// # Errors
    ///
    /// Whatever the source meets; the save fails on all ranks with [`Error::Source`](crate::Error::Source).
    fn part(&mut self, tensor: &TensorSpec, region: &Region) -> Result<PartBytes<'_>, BoxError>;
}

impl<F: FnMut(&TensorSpec, &Region) -> Result<Vec<u8>, BoxError>> Source for F {
    fn part(&mut self, tensor: &TensorSpec, region: &Region) -> Result<PartBytes<'_>, BoxError> {
        Ok(Box::new(self(tensor, region)?))
    }
}

/// What one rank holds at one moment, by the names of the tensors.
///
/// Takes any owned bytes without copying them: `Vec<u8>`, `Arc<[u8]>`, or a type of its user's. Each
/// is freed as soon as it is written. Tensors that the plan does not ask this rank for are ignored.
#[derive(Default)]
pub struct Snapshot {
    parts: HashMap<String, PartBytes<'static>>,
}

impl Snapshot {
    /// Nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what this rank holds of a tensor.
    pub fn insert(
        &mut self,
        tensor: impl Into<String>,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) {
        self.parts.insert(tensor.into(), Box::new(bytes));
    }

    /// Bytes of all tensors.
    pub fn num_bytes(&self) -> usize {
        let parts = self.parts.values();
        parts.map(|part| part.as_ref().as_ref().len()).sum()
    }
}

impl Source for Snapshot {
    fn part(&mut self, tensor: &TensorSpec, _: &Region) -> Result<PartBytes<'_>, BoxError> {
        let part = self.parts.remove(&tensor.name);
        part.ok_or_else(|| "it is not in the snapshot; insert what this rank holds of it".into())
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("num_tensors", &self.parts.len())
            .field("num_bytes", &self.num_bytes())
            .finish()
    }
}
