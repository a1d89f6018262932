//! The tensors that a hook returns, perhaps before its communication has ended.

use std::fmt;

use burn::tensor::Tensor;

use crate::ambient::{Purpose, within};
use crate::error::Error;

/// The tensors of a collective that a hook has started: the hook waits for them, or returns them to the engine, which
/// waits as late as for its own collectives. If ranks are processes, other work goes on meanwhile.
///
/// Tensors that are ready convert to this type with [`From`] or [`collect`](Iterator::collect).
#[must_use = "the tensors are in it"]
pub struct PendingTensors(State);

enum State {
    Ready(Vec<Tensor<1>>),
    Pending(Box<dyn FnOnce() -> Result<Vec<Tensor<1>>, Error> + Send>),
}

impl PendingTensors {
    pub(super) fn new(
        wait: impl FnOnce() -> Result<Vec<Tensor<1>>, Error> + Send + 'static,
    ) -> Self {
        Self(State::Pending(Box::new(wait)))
    }

    /// Waits for the tensors.
    ///
    /// # Errors
    ///
    /// A failed collective.
    pub fn wait(self) -> Result<Vec<Tensor<1>>, Error> {
        match self.0 {
            State::Ready(tensors) => Ok(tensors),
            State::Pending(wait) => within(Purpose::Hook, wait),
        }
    }

    /// Returns the tensors changed by `change`, once they exist. `change` must not communicate and must not use sharded
    /// modules: ranks call it at different times, and a rank that does not need the result does not call it.
    pub fn map(
        self,
        change: impl FnOnce(Vec<Tensor<1>>) -> Vec<Tensor<1>> + Send + 'static,
    ) -> Self {
        self.and_then(|tensors| Ok(change(tensors)))
    }

    /// Returns the tensors changed by `change`, once they exist, which may fail.
    pub(super) fn and_then(
        self,
        change: impl FnOnce(Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, Error> + Send + 'static,
    ) -> Self {
        Self::new(move || change(self.wait()?))
    }
}

impl From<Vec<Tensor<1>>> for PendingTensors {
    fn from(tensors: Vec<Tensor<1>>) -> Self {
        Self(State::Ready(tensors))
    }
}

impl FromIterator<Tensor<1>> for PendingTensors {
    fn from_iter<I: IntoIterator<Item = Tensor<1>>>(tensors: I) -> Self {
        Self::from(tensors.into_iter().collect::<Vec<_>>())
    }
}

impl fmt::Debug for PendingTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingTensors").finish_non_exhaustive()
    }
}
