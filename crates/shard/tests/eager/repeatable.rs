//! Runs that give the same bits again.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch, launcher_ranks};
use burn_fsdp_shard::{Error, ShardPolicy};

use super::bench::{Case, Outcome, build, device, train};
use super::launcher;
use super::nets::input;

/// Two layers with dropout between them, whose loss is the mean of so many elements that Burn's CPU backend divides the
/// sum among free threads.
#[derive(Module, Debug)]
struct Wide {
    layers: Vec<Linear>,
    dropout: Dropout,
}

const ROWS: usize = 1 << 10;
const COLUMNS: usize = 4099;

impl Wide {
    fn new(device: &Device) -> Self {
        Self {
            layers: vec![
                LinearConfig::new(5, 7).init(device),
                LinearConfig::new(7, COLUMNS).init(device),
            ],
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x = input([ROWS, 5], rank, step, device);
        let x = self.dropout.forward(self.layers[0].forward(x));
        self.layers[1].forward(x).powf_scalar(2.0).mean()
    }
}

const WIDE: Case<Wide> = Case {
    build: Wide::new,
    loss: Wide::loss,
};

/// Trains from seeds that differ by rank.
fn trained(world: &ProcessGroup, seed: u64) -> Result<Outcome, Error> {
    let device = device();
    let policy = ShardPolicy::new().units(["layers.*"]);
    let model = build(WIDE, world, &device, policy)?;
    device.seed(seed + world.rank() as u64);
    train(model, WIDE, world.rank(), 4, &device)
}

/// Dropout draws from one generator of a process, so each rank must be a process.
#[test]
fn processes_with_seeds_repeat_every_bit() {
    let name = "repeatable::processes_with_seeds_repeat_every_bit";
    if launcher::scene().is_none() {
        for processes in 1..=3 {
            launcher::again_as_processes(processes, name);
        }
        return;
    }
    // A rank with exactly one compute thread adds in a fixed order.
    let config = LaunchConfig::new(launcher_ranks().unwrap_or(1))
        .threads_per_rank(1)
        .without_background();
    let body = |world: ProcessGroup| {
        let first = trained(&world, 11)?;
        let second = trained(&world, 11)?;
        assert_eq!(first.params, second.params);
        let bits = |outcome: &Outcome| -> Vec<u32> {
            outcome.losses.iter().map(|loss| loss.to_bits()).collect()
        };
        assert_eq!(bits(&first), bits(&second));
        let other = trained(&world, 12)?;
        assert_ne!(first.params, other.params, "dropout draws from the seed");
        Ok::<_, Error>(())
    };
    launch(config, body).unwrap_or_else(|error| panic!("{error}"));
}
