//! A whole train step as one SPMD graph: trace, place, passes, plan, run.
#![forbid(unsafe_code)]

mod compile;
mod error;
pub mod graph;
mod initial;
pub mod passes;
pub mod place;
pub mod plan;
pub mod run;
pub mod trace;

pub use compile::{CompiledStep, Mode, compile, compile_on, lower};
pub use error::Error;
pub use place::DataParallel;
pub use trace::{Batch, BatchMapper};
