//! The machine's limits, measured in the same run as the numbers compared with them.

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_fsdp::ProcessGroup;
use burn_fsdp::internals::collectives::Error;
use serde::Serialize;

/// Limits of all ranks together, measured while all of them work.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Limits {
    /// Bytes copied per second.
    pub(crate) copy: f64,
    /// Operations per second of square matrix products.
    pub(crate) products: f64,
}

const ROUNDS: usize = 7;
const COPIED: usize = 64 << 20;
const WIDTH: usize = 768;

impl Limits {
    /// Measures the limits, with matrix products on `device`. Collective: all ranks must call it.
    pub(crate) fn measure(world: &ProcessGroup, device: &Device) -> Result<Self, Error> {
        let ranks = world.size() as f64;
        let (source, mut target) = (vec![1u8; COPIED], vec![0u8; COPIED]);
        let copying = median(world, || {
            target.copy_from_slice(black_box(&source));
            black_box(&target);
        })?;
        let random = || {
            let shape = [WIDTH, WIDTH];
            Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), device)
        };
        let (lhs, rhs) = (random(), random());
        let multiplying = median(world, || {
            let product = lhs.clone().matmul(rhs.clone());
            // Reading an element waits for the device.
            black_box(product.slice([0..1, 0..1]).into_data());
        })?;
        Ok(Self {
            copy: ranks * COPIED as f64 / copying,
            products: ranks * 2.0 * (WIDTH as f64).powi(3) / multiplying,
        })
    }
}

/// Returns the median over several rounds of the slowest rank's seconds. An additional first round maps new pages.
fn median(world: &ProcessGroup, mut work: impl FnMut()) -> Result<f64, Error> {
    work();
    let mut seconds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        world.barrier("start of a measurement")?;
        let start = Instant::now();
        work();
        world.barrier("end of a measurement")?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[ROUNDS / 2])
}
