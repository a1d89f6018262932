//! One training step of a GPT: `full-shard` compared with `no-shard` on the same ranks and device settings, in
//! interleaved pairs.
//!
//! ```text
//! cargo bench -p burn-fsdp --bench step -- [--ranks N] [--pairs N] [--json FILE]
//! ```
//!
//! Prints the median ratio of the pairs with its 95 % interval (of the median, by order statistics). It also prints the
//! limits of the same run: the time that the ranks need to copy all parameters at once, and the rate of matrix
//! products. The file of raw results starts with commit, machine and flags.

use std::time::Instant;

use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use burn_fsdp::inspect::num_params;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch,
};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};
use limits::Limits;
use run::Run;
use times::Middle;

#[path = "../../../benches/flags.rs"]
mod flags;
#[path = "../../../benches/limits.rs"]
mod limits;
#[path = "../../../benches/origin.rs"]
mod run;
#[path = "../../../benches/times.rs"]
mod times;

/// The peer programs' default shape.
const CONFIG: GptConfig = GptConfig {
    layers: 6,
    dim: 384,
    heads: 6,
    vocab: 4096,
    seq: 256,
};
const BATCH: usize = 8;
const WARMUP: usize = 3;

struct Arguments {
    ranks: usize,
    pairs: usize,
    json: Option<String>,
}

impl Arguments {
    fn read() -> Self {
        let mut arguments = Self {
            ranks: 2,
            pairs: 24,
            json: None,
        };
        flags::for_each(|flag, value| match flag {
            "--ranks" => arguments.ranks = value.number(),
            "--pairs" => arguments.pairs = value.number(),
            "--json" => arguments.json = value.text(),
            _ => {}
        });
        arguments
    }
}

/// One side of the comparison: a model and its optimizer.
struct Side {
    model: Option<Gpt>,
    optim: ModuleOptimizer,
    step: usize,
}

impl Side {
    fn new(mesh: &ProcessMesh, device: &Device, strategy: Strategy) -> Result<Self, Error> {
        let model = CONFIG.init(device, 1).expect("the configuration is valid");
        let policy = ShardPolicy::new().units(["blocks.*"]).strategy(strategy);
        Ok(Self {
            model: Some(fully_shard(model, mesh, policy)?),
            optim: AdamWConfig::new().init(),
            step: 0,
        })
    }

    /// Returns the milliseconds of one step, from the start of all ranks to the end of the last rank.
    fn step(&mut self, world: &ProcessGroup, device: &Device) -> Result<f64, Error> {
        let rows = BATCH / world.size();
        let batches = batches();
        let first = world.rank() * rows;
        let rows = batches.rows(self.step, first..first + rows);
        let (inputs, targets) = rows.to_tensors(device);
        let model = self.model.take().expect("a side keeps its model");
        world.barrier("start of a step")?;
        let start = Instant::now();
        let loss = model.loss(inputs, targets);
        let gradients = backward(loss, &model)?;
        self.model = Some(self.optim.step(1e-3, model, gradients));
        world.barrier("end of a step")?;
        self.step += 1;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

fn batches() -> Batches {
    Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: BATCH,
        seq: CONFIG.seq,
    }
}

struct Pair {
    full_shard: f64,
    no_shard: f64,
}

struct Measured {
    pairs: Vec<Pair>,
    num_params: usize,
    limits: Limits,
}

fn measure(world: &ProcessGroup, pairs: usize) -> Result<Measured, Error> {
    let limits = Limits::measure(world, &Device::flex())?;
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let mut sharded = Side::new(&mesh, &device, Strategy::FullShard)?;
    let mut whole = Side::new(&mesh, &device, Strategy::NoShard)?;
    for _ in 0..WARMUP {
        sharded.step(world, &device)?;
        whole.step(world, &device)?;
    }
    let mut seen = Vec::with_capacity(pairs);
    for pair in 0..pairs {
        // The first side alternates, so a drift of the machine favors neither.
        let (full_shard, no_shard) = if pair % 2 == 0 {
            let first = sharded.step(world, &device)?;
            (first, whole.step(world, &device)?)
        } else {
            let first = whole.step(world, &device)?;
            (sharded.step(world, &device)?, first)
        };
        seen.push(Pair {
            full_shard,
            no_shard,
        });
    }
    Ok(Measured {
        pairs: seen,
        num_params: sharded.model.as_ref().map_or(0, num_params),
        limits,
    })
}

fn main() {
    burn_fsdp::allocator::keep_freed_memory();
    let arguments = Arguments::read();
    let pairs = arguments.pairs.max(1);
    let results = launch(LaunchConfig::new(arguments.ranks), move |world| {
        measure(&world, pairs)
    });
    let results = results.unwrap_or_else(|error| panic!("{error}"));
    let Measured {
        pairs,
        num_params: params,
        limits,
    } = &results[0];
    let run = Run::here("step");
    let ratio = Middle::of(pairs.iter().map(|p| p.full_shard / p.no_shard));
    let full_shard = Middle::of(pairs.iter().map(|p| p.full_shard)).median;
    let no_shard = Middle::of(pairs.iter().map(|p| p.no_shard)).median;
    println!("{run}");
    println!(
        "{params} parameters, {} ranks, {} pairs",
        arguments.ranks,
        pairs.len()
    );
    println!("full-shard  {full_shard:9.1} ms a step (median)");
    println!("no-shard    {no_shard:9.1} ms a step (median)");
    println!("ratio       {ratio}");
    let tokens = BATCH * CONFIG.seq;
    println!(
        "{}",
        limits::beside(limits, *params, tokens, arguments.ranks, full_shard)
    );
    if let Some(path) = arguments.json {
        let raw = pairs.iter().map(|pair| [pair.full_shard, pair.no_shard]);
        let text = serde_json::json!({
            "run": run.to_json(),
            "params": params,
            "ranks": arguments.ranks,
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
            "copy_bytes_per_s": limits.copy,
            "products_flops_per_s": limits.products,
            "full_shard_no_shard_ms": raw.collect::<Vec<_>>(),
        });
        std::fs::write(&path, format!("{text}\n"))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}
