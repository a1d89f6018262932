//! Plans against what runs.

mod analytic;
mod executor;
#[path = "../spmd/models.rs"]
mod models;
