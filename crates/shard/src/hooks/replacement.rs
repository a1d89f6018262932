//! A user's function that replaces a collective of the engine.

use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::pending::PendingTensors;
use crate::ambient::{Purpose, within};
use crate::error::Error;

/// A function that replaces the collective `C`: it receives this rank's tensors, and returns the results for this rank.
pub(crate) struct Replacement<C>(Arc<Function<C>>);

type Function<C> = dyn Fn(&C) -> Result<PendingTensors, Error> + Send + Sync;

/// A collective that a hook may replace.
pub(crate) trait Replaceable: Send + 'static {
    /// Checks that results are flat, without autodiff, and of the right lengths.
    fn check_results(&self, results: &[Tensor<1>]) -> Result<(), Error>;
}

impl<C: Replaceable> Replacement<C> {
    pub(crate) fn new(
        function: impl Fn(&C) -> Result<PendingTensors, Error> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(function))
    }

    /// Calls the hook, and returns its results. They are checked when they exist.
    pub(crate) fn call(&self, collective: C) -> Result<PendingTensors, Error> {
        let results = within(Purpose::Hook, || (self.0)(&collective))?;
        Ok(results.and_then(move |results| {
            collective.check_results(&results)?;
            Ok(results)
        }))
    }
}

impl<C> Clone for Replacement<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Clones of a hook are equal.
impl<C> PartialEq for Replacement<C> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<C> fmt::Debug for Replacement<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replacement").finish_non_exhaustive()
    }
}
