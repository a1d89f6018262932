//! The copies of a module that optimizers, clones and records create, and which values belong together.
//!
//! - `generation`: the values of one unit in one copy of the module.
//! - `values`: these values, without their graphs. `holders`: the copies that hold them.
//! - `lifecycle`: the life cycle of the full parameters gathered from them.
//! - `sealed`: the seals of values, and their checks.
//! - `replaced`: values that the optimizer has replaced before backward ended. `live`: all generations of one unit.

mod generation;
mod holders;
mod lifecycle;
mod live;
mod replaced;
mod sealed;
mod values;

pub use lifecycle::UnitState;

pub(crate) use generation::{Generation, Transition};
pub(crate) use holders::Copied;
pub(crate) use lifecycle::Gather;
pub(crate) use live::{Copies, WeakCopies};
