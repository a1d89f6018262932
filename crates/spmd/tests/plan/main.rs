//! Plans against what runs.

mod executor;
#[path = "../spmd/models.rs"]
mod models;
