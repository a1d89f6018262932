//! Predicts the memory, traffic and time of a step before anything runs.
//!
//! There are two entry points:
//!
//! - [`Plan::new`] takes a **scheduled graph**. It returns one rank's live bytes at every node, exactly as the executor
//!   will count them. It also counts collectives and arithmetic, and estimates the time and the bytes of the process.
//! - [`Estimate::new`] takes a [`Job`]: the sizes of a decoder and the settings of its training. It needs no graph and
//!   uses formulas for the eager engine. It reports whether the job fits, when memory peaks, and which changes would
//!   make it fit.
//!
//! Both implement `Display` and `Serialize`, and can be drawn as an SVG of memory over the step.
//!
//! | module | content |
//! |---|---|
//! | `step` | plans of graphs |
//! | `budget` | the choice of units to recompute, based on plans |
//! | `formula` | estimates of jobs |
//! | `backend` | the memory of results on Burn's CPU backend |
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
pub use step::{MemoryPlan, Moment, Plan, ProcessBytes, TimePlan};
pub use traced::TracedEstimate;
pub use traffic::{Tally, Traffic};
