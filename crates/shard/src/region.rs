//! The recomputed region that this thread is in, and the roots whose units the region uses.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::ambient::{self, Purpose};

/// The phase of a recomputed region that this thread is running, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum RegionState {
    /// No region, or an ordinary forward and backward.
    #[default]
    Off,
    /// The region's forward, without a graph.
    Plain,
    /// The region's second forward, or its backward.
    Again,
}

/// A root whose units a region may use.
pub(crate) trait Recomputed: Send + Sync {
    /// Ends the second forward of the region.
    fn end_recomputation(&self);
}

/// A root with a unit that the region has used.
pub(crate) struct Touched {
    pub(crate) by: Arc<dyn Recomputed>,
    /// The token of the pass in which the region runs.
    pub(crate) token: Tensor<1>,
}

thread_local! {
    static TOUCHED: RefCell<Vec<Touched>> = const { RefCell::new(Vec::new()) };
}

/// Returns the phase of the region that this thread is running, if any.
pub(crate) fn state() -> RegionState {
    match ambient::innermost(&[Purpose::Region, Purpose::RegionAgain]) {
        Some(Purpose::Region) => RegionState::Plain,
        Some(Purpose::RegionAgain) => RegionState::Again,
        _ => RegionState::Off,
    }
}

/// Notes that a region has used a unit of `root`. `token` is the token of the pass in which the region runs.
pub(crate) fn touch<R: Recomputed + 'static>(root: &Arc<R>, token: &Tensor<1>) {
    TOUCHED.with_borrow_mut(|touched| {
        let is_root =
            |known: &Touched| std::ptr::addr_eq(Arc::as_ptr(&known.by), Arc::as_ptr(root));
        if !touched.iter().any(is_root) {
            touched.push(Touched {
                by: root.clone(),
                token: token.clone(),
            });
        }
    });
}

/// Runs `body` as a phase of a region; returns the roots whose units it used.
pub(crate) fn within<T>(purpose: Purpose, body: impl FnOnce() -> T) -> (T, Vec<Touched>) {
    TOUCHED.take();
    let result = ambient::within(purpose, body);
    (result, TOUCHED.take())
}
