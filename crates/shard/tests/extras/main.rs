//! Functions around the eager engine: clipping, scaling, buffers, whole parameters, the wrapper.

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

mod activations;
mod adapted;
mod agreement;
mod apply_lora;
mod auto;
mod average;
mod base_bits;
mod buffer_types;
mod buffers;
mod called;
mod clip;
mod dora;
mod elementwise;
mod fake;
mod first_step;
mod full;
mod full_gradients;
mod gradients;
mod identity;
mod lora;
mod offload;
mod on_device;
mod owners;
mod packed;
mod refused;
mod restores;
mod rounding;
mod running;
mod scaler;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;
mod staging;
mod stepping;
mod unmanaged;
mod wrapper;
