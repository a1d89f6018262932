//! What lies between backward and the optimizer.
//!
//! - `gradients`: who holds what of each. `clip`: their norm. `scaler`: loss scaling.
//! - `elementwise`: which optimizers may be used.

pub(crate) mod clip;
pub(crate) mod elementwise;
pub(crate) mod gradients;
pub(crate) mod scaler;
