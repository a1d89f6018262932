//! The interface that a root calls before each gather during an evaluation.

use std::sync::Arc;

use crate::copies::Generation;
use crate::error::Error;

/// The routes of ranks through an evaluation in progress.
pub(super) trait Routes: Send + Sync {
    /// Waits until the unit of `generation` is the next one that all ranks gather.
    fn meet(&self, generation: &Arc<Generation>) -> Result<(), Error>;
}
