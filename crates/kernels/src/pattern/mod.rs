//! Patterns: lists of Burn's operations that kernels replace.
//!
//! - `kind`: the operations in patterns.
//! - `search`: the graph in which patterns are searched, and the changes to it.
//! - `steps`: patterns as data.
//! - `walk`: the search for a gradient's operations, for patterns that are functions.

mod kind;
mod search;
mod steps;
mod walk;

pub use kind::{Kind, kind_of};
pub use search::{Inserted, PatternChange, PatternNode, PatternPhase, Patterns};
pub use steps::{PatternKernel, PatternStep, StepKind, Steps};
pub(crate) use walk::{Total, Walk, the_other};
