//! Fields that share a parameter (clones of it, with one id), compared with the same module that reads one field
//! twice.

#[allow(
    dead_code,
    reason = "shared with the engine's tests, which use other parts"
)]
#[path = "../eager/bench.rs"]
mod bench;
#[allow(
    dead_code,
    reason = "shared with the engine's tests, which use other parts"
)]
#[path = "../eager/nets.rs"]
mod nets;

mod copies;
mod model;
mod refused;
mod steps;
