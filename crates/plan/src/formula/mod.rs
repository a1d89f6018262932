//! A decoder by its sizes, trained by the eager engine.

mod estimate;
mod fit;
mod job;
mod transformer;

pub use estimate::Estimate;
pub(crate) use estimate::Verdict;
pub use fit::{Advice, advise};
pub use job::{Checkpointing, Division, Duration, Job, Precision, Stop};
pub use transformer::Transformer;
