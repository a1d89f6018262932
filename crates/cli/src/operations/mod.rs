//! The operations of a run, written down and compared with those of another.

pub(crate) mod diff;
mod line;
pub(crate) mod write;
