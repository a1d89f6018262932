//! A whole train step as one SPMD graph: trace, place, passes, plan, run.
#![forbid(unsafe_code)]

mod error;
pub mod graph;
pub mod trace;

pub use error::Error;
pub use trace::{Batch, BatchMapper};
