//! Compiled train steps against Burn's eager ones.

mod compiled;
mod custom;
mod eager;
#[path = "../common/fused.rs"]
mod fused;
mod limits;
mod models;
mod parallel;
mod passes;
mod placement;
mod scale;
