//! Records of a run's operations, and their comparison between runs.

pub(crate) mod diff;
mod line;
pub(crate) mod write;
