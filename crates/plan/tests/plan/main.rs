//! Plans against what runs.

mod analytic;
mod budget;
mod custom;
mod executor;
#[path = "../../../spmd/tests/spmd/models.rs"]
mod models;
