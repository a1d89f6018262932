//! Formula-based estimates for the eager engine, from a decoder's sizes.

mod estimate;
mod fit;
mod job;
mod transformer;

pub use estimate::Estimate;
pub(crate) use estimate::Verdict;
pub use fit::{Advice, advise};
pub use job::{Checkpointing, Duration, Job, Precision, Stop};
pub use transformer::Transformer;
