//! Compiled train steps against Burn's eager ones.

mod compiled;
mod eager;
mod limits;
mod models;
mod parallel;
mod passes;
mod placement;
mod scale;
