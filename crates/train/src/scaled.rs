//! The scale of a rank's losses, for the step that the user writes.
//!
//! Burn's loop calls the user's step, which computes its own backward. So the step asks for the scale, which the rank's
//! thread carries meanwhile.

use std::cell::RefCell;

use burn::tensor::Tensor;
use burn_fsdp_shard::LossScaler;

/// A step's scaler, and whether the step has scaled its loss.
struct Current {
    scaler: LossScaler,
    is_used: bool,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Runs a step whose losses `scaler` scales. Returns its output, and whether it has scaled a loss.
pub(crate) fn within<T>(scaler: &LossScaler, step: impl FnOnce() -> T) -> (T, bool) {
    /// Ends the step, also if it unwinds.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            CURRENT.set(None);
        }
    }
    CURRENT.set(Some(Current {
        scaler: scaler.clone(),
        is_used: false,
    }));
    let _end = End;
    let output = step();
    let is_used = CURRENT.with_borrow(|current| current.as_ref().is_some_and(|it| it.is_used));
    (output, is_used)
}

/// Returns the loss times the scale of the step that this thread runs, or unchanged if losses are not scaled.
pub(crate) fn scaled<const D: usize>(loss: Tensor<D>) -> Tensor<D> {
    CURRENT.with_borrow_mut(|current| match current {
        Some(current) => {
            current.is_used = true;
            current.scaler.scale(loss)
        }
        None => loss,
    })
}
