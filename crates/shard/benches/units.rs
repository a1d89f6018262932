//! Time of a step of many small units beside plain Burn's: what a unit costs by itself.
//!
//! Plain Burn is timed with its balanced checkpointing, which sharding needs, and without: Burn's bookkeeping for it grows
//! faster than the depth of a model.
//!
//! `cargo bench -p burn-fsdp-shard --bench units [NUM_UNITS ..]`

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, fully_shard};

const DIM: usize = 16;
const STEPS: usize = 21;

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn new(num_layers: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(DIM, DIM).init(device);
        Self {
            layers: (0..num_layers).map(layer).collect(),
        }
    }

    fn loss(&self, device: &Device) -> Tensor<1> {
        let x = Tensor::<2>::ones([2, DIM], device);
        let y = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        y.mean()
    }
}

/// The median of forward and backward.
fn median(mut step: impl FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let begin = Instant::now();
        step()?;
        times.push(begin.elapsed());
    }
    // The first ones agree on the order.
    let mut times = times.split_off(3);
    times.sort();
    Ok(times[times.len() / 2])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<usize> = std::env::args()
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let numbers = if numbers.is_empty() {
        vec![24, 96, 400]
    } else {
        numbers
    };
    println!("units    plain Burn  checkpointing       1 rank  a unit costs      2 ranks");
    for number in numbers {
        let plainly = |device: Device| {
            let model = Stack::new(number, &device);
            median(|| {
                let gradients = model.loss(&device).backward();
                drop(GradientsParams::from_grads(gradients, &model));
                Ok(())
            })
        };
        let kept = plainly(Device::flex().autodiff())?;
        let plain = plainly(Device::flex().autodiff().gradient_checkpointing())?;
        let on = |ranks: usize| {
            launch(LaunchConfig::new(ranks), move |world| {
                let device = Device::flex().autodiff().gradient_checkpointing();
                let mesh = ProcessMesh::new(&world, Mesh::line("shard", ranks)?)?;
                let policy = ShardPolicy::new().units(["layers.*"]);
                let model = fully_shard(Stack::new(number, &device), &mesh, policy)?;
                median(|| backward(model.loss(&device), &model).map(drop))
            })
        };
        let (one, two) = (on(1)?[0], on(2)?[0]);
        println!(
            "{number:>5} {:>10.2} ms {:>11.2} ms {:>9.2} ms {:>10.1} us {:>9.2} ms",
            kept.as_secs_f64() * 1e3,
            plain.as_secs_f64() * 1e3,
            one.as_secs_f64() * 1e3,
            (one.as_secs_f64() - plain.as_secs_f64()) / number as f64 * 1e6,
            two.as_secs_f64() * 1e3,
        );
    }
    Ok(())
}
