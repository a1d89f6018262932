//! What a root asks before a gather while it is evaluated.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::copies::Generation;
use crate::error::Error;

/// The routes of ranks through an evaluation under way.
pub(super) trait Routes: Send + Sync {
    /// Waits until the unit of `generation` is the one that all ranks gather next.
    fn meet(&self, generation: &Arc<Generation>) -> Result<(), Error>;
}

/// The evaluation that a root takes part in, if there is one.
#[derive(Default)]
pub(super) struct UnderWay(Mutex<Option<Arc<dyn Routes>>>);

impl UnderWay {
    pub(super) fn get(&self) -> Option<Arc<dyn Routes>> {
        self.0.lock().clone()
    }

    pub(super) fn set(&self, routes: Option<Arc<dyn Routes>>) {
        *self.0.lock() = routes;
    }
}
