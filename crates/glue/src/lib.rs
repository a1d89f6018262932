//! The glue between sharded modules, compiled steps and files: snapshots, saving and restoring, optimizers' records,
//! state in files, and the one error of the library.
//!
//! [`burn_fsdp`](https://docs.rs/burn-fsdp) exports what programs need, and documents it.
#![forbid(unsafe_code)]

pub mod blocking;
pub mod checkpointer;
pub mod compiled_restore;
pub mod compiled_snapshot;
pub mod device_name;
pub mod dtype;
pub mod error;
pub mod file_backed;
mod file_backed_steps;
mod optimizer_cut;
pub mod optimizer_record;
pub mod optimizer_state;
pub mod optimizer_whole;
pub mod piecewise;
pub mod rendezvous;
pub mod restore;
pub mod scaler;
pub mod snapshot;
pub mod state_types;
mod tied;
