//! What a step will cost, before anything runs.
//!
//! Two ways lead there:
//!
//! - [`Plan::new`] takes a **scheduled graph** and gives one rank's live bytes at every node, exactly as
//!   the executor's table will count them, what the process's allocator has beside them, its collectives, its
//!   arithmetic and a time estimate.
//! - [`Estimate::new`] takes a [`Job`]: a decoder by its sizes, and how it is to be trained. It answers
//!   by formula, for the eager engine and for sizes that no graph is needed for, whether the job
//!   fits, when its peak is and what would make it fit.
//!
//! Both are printed by `Display`, as JSON by `serde`, and as an SVG of memory over the step.

mod allocated;
mod category;
mod estimate;
mod extrapolate;
mod fit;
mod heap;
mod job;
mod kernel;
mod layout;
mod machine;
mod memory;
#[cfg(feature = "draw")]
mod picture;
mod report;
mod scratch;
mod time;
mod traced;
mod traffic;
mod transformer;
mod transport;

pub use crate::graph::Flops;
pub use allocated::KernelScratch;
pub use category::{Bytes, Category};
pub use estimate::Estimate;
pub use fit::{Advice, advise};
pub use job::{Checkpointing, Division, Duration, Job, Precision, Stop};
pub use machine::{Link, Machine};
pub use memory::{MemoryPlan, Moment};
pub use report::{Plan, Size};
pub use time::TimePlan;
pub use traced::TracedEstimate;
pub use traffic::{Tally, Traffic};
pub use transformer::Transformer;
