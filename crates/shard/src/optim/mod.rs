//! The work on gradients between backward and the optimizer.
//!
//! - `gradients`: each gradient, and the ranks that hold it. `clip`: their norm. `scaler`: loss scaling.
//! - `elementwise`: the check that an optimizer may be used. `sealed`: an optimizer whose states are checked.

pub(crate) mod clip;
pub(crate) mod elementwise;
pub(crate) mod gradients;
pub(crate) mod scaler;
pub(crate) mod sealed;
