//! The interface between a root and an evaluation in which ranks take different routes.

use std::sync::Arc;

use crate::copies::Generation;
use crate::error::Error;

/// An evaluation in progress, which decides the next gather.
pub(super) trait Routes: Send + Sync {
    /// Waits until the unit of `generation` is the next one that all ranks gather.
    fn meet(&self, generation: &Arc<Generation>) -> Result<(), Error>;
}
