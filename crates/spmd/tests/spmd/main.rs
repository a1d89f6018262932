//! Compiled train steps against Burn's eager ones.

mod compiled;
mod custom;
mod eager;
#[macro_use]
#[path = "../common/optimizers.rs"]
mod every;
#[path = "../common/fused.rs"]
mod fused;
mod limits;
mod models;
mod optimizers;
mod parallel;
mod passes;
mod placement;
mod scale;
