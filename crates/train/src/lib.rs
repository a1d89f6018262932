//! Burn's own training loop over sharded modules: `SupervisedTraining` with its metrics, dashboard, learning-rate
//! schedules, early stopping, gradient accumulation and checkpoints.
//!
//! - `fully_sharded`: [`FullySharded`], the public interface; `launch_compiled`: its function for compiled steps;
//!   `settings`: its settings; `running`: the start of Burn's loop.
//! - `lent`: the model of Burn's learner while ranks use it.
//! - `strategy`: Burn's strategy: the split among ranks, and the results.
//! - `course`: the settings that all ranks share; `agreement`: the check that process ranks have the same settings.
//! - `rank`: the loop of one rank; `trainer`: the part that depends on the engine, `eager` or `compiled`. `groups`: a rank's
//!   groups. `rounds`: the batches of all ranks, step by step. `lead`: rank 0's work for all.
//! - `scaled`: the scale of a step's loss, which the user's step asks for.
//! - `outputs`: the steps' outputs for the metrics, in transit to rank 0; `portable`: outputs as tensors that can be
//!   sent between processes.
//! - `stop`: the reason why a rank stops, and its message to the others; `notes`: messages between ranks.
//! - `compiled_output`: the outputs of compiled steps; `compiled_state`: their checkpoints.
//! - `whole_state`: the optimizer's state in shards, from and to Burn's record of it; `filed`: the whole state in a
//!   file; `staging`: the contents of a checkpoint, in files; `scratch`: these files.
#![forbid(unsafe_code)]

mod agreement;
mod compiled;
mod compiled_output;
mod compiled_state;
mod course;
mod eager;
mod filed;
mod fully_sharded;
mod groups;
mod launch_compiled;
mod lead;
mod lent;
mod notes;
mod outputs;
mod portable;
mod rank;
mod rounds;
mod running;
mod scaled;
mod scratch;
mod settings;
mod staging;
mod stop;
mod strategy;
mod trainer;
mod whole_state;

pub use compiled_output::CompiledOutput;
pub use fully_sharded::FullySharded;
pub use lent::Lent;
pub use portable::{Parcel, Portable};
