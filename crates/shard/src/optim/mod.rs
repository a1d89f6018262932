//! Gradients between backward and the optimizer, and optimizers of sharded parameters.
//!
//! - `gradients`: the gradients, and the ranks that hold each. `full_gradients`: whole gradients for plain copies.
//!   `clip`: the gradients' norm; `measured`: the contribution of each gradient to it. `scaler`: loss scaling.
//! - `elementwise`: the check that an optimizer works on shards. `sealed`: an optimizer whose states are checked for
//!   corruption. `low_bit`: one that keeps its states in fewer bits.

pub(crate) mod clip;
pub(crate) mod elementwise;
pub(crate) mod full_gradients;
pub(crate) mod gradients;
pub(crate) mod low_bit;
mod measured;
pub(crate) mod scaler;
pub(crate) mod sealed;
