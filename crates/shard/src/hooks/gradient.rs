//! A user's function that changes gradients before they are reduced.

use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::ambient::{Purpose, is_within, within};

/// A function that changes this rank's full gradient of a parameter before it is reduced, for compression, noise or
/// statistics. It receives the parameter's path and flat gradient, and returns a gradient of the same length.
#[derive(Clone)]
pub(crate) struct GradientHook(Arc<ChangeGradient>);

/// The user's function, which maps a path and a flat gradient to a gradient of the same length.
type ChangeGradient = dyn Fn(&str, Tensor<1>) -> Tensor<1> + Send + Sync;

impl GradientHook {
    pub(crate) fn new(
        change: impl Fn(&str, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(change))
    }

    /// Returns a hook that passes this hook's result to `next`.
    pub(crate) fn then(self, next: Self) -> Self {
        Self::new(move |path, gradient| (next.0)(path, (self.0)(path, gradient)))
    }

    /// Calls the hook on `gradient`, and returns the new gradient.
    pub(crate) fn call(&self, path: &str, gradient: Tensor<1>) -> Tensor<1> {
        within(Purpose::Hook, || (self.0)(path, gradient))
    }

    pub(crate) fn is_running() -> bool {
        is_within(Purpose::Hook)
    }
}

impl fmt::Debug for GradientHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientHook")
    }
}
