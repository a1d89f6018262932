//! A whole train step as one SPMD graph: trace, place, passes, plan, run.
#![forbid(unsafe_code)]

mod error;
pub mod graph;

pub use error::Error;
