//! Tests of plans against real runs.

mod analytic;
mod budget;
mod custom;
mod executor;
#[path = "../../../spmd/tests/spmd/models.rs"]
mod models;
