//! Plans against what runs.

mod analytic;
mod executor;
#[path = "../common/fused.rs"]
mod fused;
#[path = "../spmd/models.rs"]
mod models;
