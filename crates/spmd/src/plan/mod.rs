//! What a step will cost, before anything runs.

mod category;
mod kernel;
mod layout;
mod memory;

pub use category::{Bytes, Category};
pub use memory::{MemoryPlan, Moment};
