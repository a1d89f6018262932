//! Plans of the memory, traffic and time of a step, before anything runs.
//!
//! There are two kinds:
//!
//! - [`Plan::new`] takes a **scheduled graph** and gives one rank's live bytes at every node, exactly as
//!   the executor's table will count them, what the process's allocator has beside them, its collectives, its
//!   arithmetic and a time estimate.
//! - [`Estimate::new`] takes a [`Job`]: a decoder by its sizes, and how it is to be trained. It answers
//!   by formula, for the eager engine and for sizes that no graph is needed for, whether the job
//!   fits, when its peak is and what would make it fit.
//!
//! Both are printed by `Display`, as JSON by `serde`, and as an SVG of memory over the step.
//!
//! | module | what |
//! |---|---|
//! | `step` | plans of graphs |
//! | `budget` | the choice of what to compute again, by plans |
//! | `formula` | estimates of jobs |
//! | `backend` | where Burn's CPU backend puts results, and what it allocates beside them |
#![forbid(unsafe_code)]

mod backend;
mod budget;
mod category;
mod formula;
mod machine;
#[cfg(feature = "draw")]
mod picture;
mod size;
mod step;
mod traced;
mod traffic;

pub use budget::{BudgetError, Fitted, fit};
pub use burn_fsdp_spmd::graph::Flops;
pub use category::{Bytes, Category};
pub use formula::{
    Advice, Checkpointing, Duration, Estimate, Job, Precision, Stop, Transformer, advise,
};
pub use machine::{Link, Machine};
pub use size::Size;
pub use step::{KernelScratch, MemoryPlan, Moment, Plan, TimePlan};
pub use traced::TracedEstimate;
pub use traffic::{Tally, Traffic};
