//! Plans of scheduled graphs: one rank's bytes at every node, its collectives, arithmetic and time.

mod extrapolate;
mod heap;
mod memory;
mod process;
mod replay;
mod report;
mod time;

pub use memory::{MemoryPlan, Moment};
pub use process::ProcessBytes;
pub use report::Plan;
pub use time::TimePlan;
pub(crate) use time::node_seconds;
