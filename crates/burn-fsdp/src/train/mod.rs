//! Burn's own training loop over sharded modules: `SupervisedTraining` with its metrics, dashboard, learning-rate
//! schedules, early stopping, gradient accumulation and checkpoints.
//!
//! - `fully_sharded`: [`FullySharded`], what users call; `settings`: what they say there.
//! - `lent`: the model of Burn's learner, while the ranks have it.
//! - `strategy`: Burn's strategy: what is divided among the ranks, and what comes back.
//! - `rank`: the loop of one rank. `rounds`: the batches of all ranks, step by step. `lead`: what rank 0 does for all.
//! - `whole_state`: the optimizer's state in shards, from and to Burn's record of it.

mod fully_sharded;
mod lead;
mod lent;
mod rank;
mod rounds;
mod settings;
mod strategy;
mod whole_state;

pub use fully_sharded::FullySharded;
pub use lent::Lent;
