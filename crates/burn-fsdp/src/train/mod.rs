//! Burn's own training loop over sharded modules: `SupervisedTraining` with its metrics, dashboard, learning-rate
//! schedules, early stopping, gradient accumulation and checkpoints.
//!
//! - `fully_sharded`: [`FullySharded`], what users call; `settings`: what they say there.
//! - `lent`: the model of Burn's learner, while the ranks have it; `lock`: how what threads share is taken.
//! - `strategy`: Burn's strategy: what is divided among the ranks, and what comes back.
//! - `course`: what all ranks do; `agreement`: that ranks which are processes are about to do the same.
//! - `rank`: the loop of one rank. `rounds`: the batches of all ranks, step by step. `lead`: what rank 0 does for all.
//! - `outputs`: what steps give to the metrics, on its way to rank 0; `portable`: as tensors that travel between processes.
//! - `stop`: why a rank stops, and how the others learn of it; `notes`: what ranks tell each other.
//! - `whole_state`: the optimizer's state in shards, from and to Burn's record of it; `filed`: all of it in a file;
//!   `staging`: what a checkpoint has, in files; `scratch`: these files.

mod agreement;
mod course;
mod filed;
mod fully_sharded;
mod lead;
mod lent;
mod lock;
mod notes;
mod outputs;
mod portable;
mod rank;
mod rounds;
mod scratch;
mod settings;
mod staging;
mod stop;
mod strategy;
mod whole_state;

pub use fully_sharded::FullySharded;
pub use lent::Lent;
pub use portable::{Parcel, Portable};
