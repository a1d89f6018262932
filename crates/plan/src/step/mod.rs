//! Plans of scheduled graphs: one rank's bytes at every node, its collectives, arithmetic and time.

mod allocated;
mod extrapolate;
mod heap;
mod memory;
mod pool;
mod replay;
mod report;
mod time;

pub use allocated::KernelScratch;
pub use memory::{MemoryPlan, Moment};
pub use report::Plan;
pub use time::TimePlan;
pub(crate) use time::node_seconds;
