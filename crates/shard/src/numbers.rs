//! Random numbers that a recomputed region draws twice.
//!
//! Burn has one generator for all threads of a process, and only its seed can be set. So a region draws a seed, seeds
//! the generator with it, and seeds it again with the same seed when recomputed. If ranks are threads, regions do not
//! do this, because each would restart the other ranks' numbers.

use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_fsdp_collectives::thread_ranks;

/// The seed of a region's random numbers, and their device.
pub(crate) struct Numbers {
    seed: u64,
    device: Device,
}

/// Returns true if no other rank draws from this process's generator.
fn is_alone() -> bool {
    thread_ranks() <= 1
}

/// Draws a seed from the device's generator.
fn drawn(device: &Device) -> u64 {
    let parts = Tensor::<1, Int>::random([4], Distribution::Uniform(0.0, 65_536.0), device);
    let parts = parts.into_data().convert::<i64>();
    let parts = parts.try_to_vec::<i64>().unwrap_or_default();
    let add = |seed: u64, part: i64| seed << 16 | part.cast_unsigned() & 0xffff;
    parts.into_iter().fold(0, add)
}

impl Numbers {
    /// Seeds the generator for a region; returns `None` if ranks are threads.
    pub(crate) fn begin(device: &Device) -> Option<Self> {
        is_alone().then(|| {
            let seed = drawn(device);
            device.seed(seed);
            Self {
                seed,
                device: device.clone(),
            }
        })
    }

    /// Runs `body` with the region's numbers again. Afterwards, the generator continues with a new seed.
    pub(crate) fn again<T>(&self, body: impl FnOnce() -> T) -> T {
        if !is_alone() {
            return body();
        }
        let next = drawn(&self.device);
        self.device.seed(self.seed);
        let result = body();
        self.device.seed(next);
        result
    }
}
