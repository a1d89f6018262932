//! Trains a model of Burn's own layers: our program for the cases that compare with PyTorch's own layers.

use std::time::Instant;

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp::compile::{Mode, compile};
use burn_fsdp::internals::compile::Error as StepError;
use burn_fsdp::{LaunchConfig, ProcessGroup, Strategy, launch};
use burn_fsdp_models::{EncoderLm, EncoderLmConfig};
use clap::Args;

use crate::error::Error;

const BATCH: usize = 8;
const RATE: f64 = 1e-4;

#[derive(Debug, Args)]
pub(crate) struct EncoderArgs {
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    #[arg(long, default_value_t = 8)]
    steps: usize,
    #[arg(long, default_value_t = 2)]
    warmup: usize,
}

/// The seconds and losses of a rank's steps.
#[derive(Debug, Default)]
struct Steps {
    seconds: Vec<f64>,
    losses: Vec<f64>,
}

/// Trains, and returns one JSON object to print.
pub(crate) fn run(args: &EncoderArgs) -> Result<String, Error> {
    let (ranks, warmup, steps) = (args.ranks, args.warmup, args.steps);
    if steps == 0 {
        return Err(Error::Zero { flag: "--steps" });
    }
    if ranks == 0 || !BATCH.is_multiple_of(ranks) {
        return Err(Error::RanksDoNotDivideBatch {
            ranks,
            batch: BATCH,
        });
    }
    let start_rss = resident_bytes("VmRSS:");
    let mut all = launch(LaunchConfig::new(ranks), move |world| {
        train(&world, warmup + steps)
    })?;
    let first = all.swap_remove(0);
    let mut measured = first.seconds[warmup..].to_vec();
    measured.sort_by(f64::total_cmp);
    let median = measured[measured.len() / 2];
    Ok(serde_json::json!({
        "ranks": ranks,
        "step_ms": 1e3 * median,
        "tokens_per_s": (BATCH * EncoderLmConfig::default().seq) as f64 / median,
        "losses": first.losses,
        "start_rss_bytes": start_rss,
        "peak_rss_bytes": [resident_bytes("VmHWM:")],
    })
    .to_string())
}

/// Returns a field of `/proc/self/status` in bytes, such as `VmRSS:`, if the system provides it.
fn resident_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

fn train(world: &ProcessGroup, steps: usize) -> Result<Steps, Box<StepError>> {
    Device::flex().seed(0);
    let config = EncoderLmConfig::default();
    let strategy = match world.size() {
        1 => Strategy::NoShard,
        _ => Strategy::FullShard,
    };
    let mode = Mode::data_parallel(world.clone(), strategy);
    let init = move |device: &Device| config.init(device);
    let step = compile(init, EncoderLm::loss, AdamWConfig::new().build(), mode);
    let mut step = step.map_err(Box::new)?;
    let rows = BATCH / world.size();
    let own = world.rank() * rows..(world.rank() + 1) * rows;
    let mut done = Steps::default();
    for number in 0..steps {
        let start = Instant::now();
        let batch = config.batch(number, own.clone(), &Device::flex());
        let loss = step.step(RATE, &batch);
        let loss = loss.map_err(Box::new)?;
        done.losses.push(loss);
        done.seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(done)
}
