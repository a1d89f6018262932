//! Training steps of a language model with Burn's own layers (`TransformerEncoder`), and without code from this
//! project. It is the counterpart of a program with PyTorch's own layers.
//!
//! ```text
//! cargo bench -p burn-fsdp --bench encoder -- [--engine compiled|eager] [--ranks N] [--steps N] [--warmup N]
//! [--layers N] [--composed] [--print] [--profile]
//! ```
//!
//! Six layers, dim 384, six heads, hidden 1536, vocabulary 4096, 256 tokens, batch 8, norms first, GELU, a causal mask,
//! learned positions averaged with tokens, no dropout, AdamW. One rank uses all threads of rayon's pool. It prints one
//! line of JSON. `--print` prints the graph of a rank, and `--profile` the times of its operations. `--composed` keeps
//! operations as the layers compose them.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::compile::{CompiledStep, Mode, Options, compile};
use burn_fsdp::{LaunchConfig, ProcessGroup, ShardPolicy, Strategy, backward, fully_shard, launch};
use burn_fsdp_models::{EncoderLm, EncoderLmConfig};

#[path = "../../../benches/flags.rs"]
mod flags;

const BATCH: usize = 8;

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);
type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Clone)]
struct Arguments {
    engine: String,
    ranks: usize,
    steps: usize,
    warmup: usize,
    layers: usize,
    composed: bool,
    prints: bool,
    profiles: bool,
}

impl Arguments {
    fn read() -> Self {
        let mut arguments = Self {
            engine: "compiled".to_owned(),
            ranks: 2,
            steps: 8,
            warmup: 2,
            layers: 6,
            composed: false,
            prints: false,
            profiles: false,
        };
        flags::for_each(|flag, value| match flag {
            "--engine" => arguments.engine = value.text().expect("--engine takes a value"),
            "--ranks" => arguments.ranks = value.number(),
            "--steps" => arguments.steps = value.number(),
            "--warmup" => arguments.warmup = value.number(),
            "--layers" => arguments.layers = value.number(),
            "--composed" => arguments.composed = true,
            "--print" => arguments.prints = true,
            "--profile" => arguments.profiles = true,
            _ => {}
        });
        arguments
    }
}

fn config(layers: usize) -> EncoderLmConfig {
    EncoderLmConfig {
        layers,
        ..EncoderLmConfig::default()
    }
}

enum Side {
    Eager(Box<Option<EncoderLm>>, ModuleOptimizer),
    Compiled(Box<CompiledStep<Tokens>>),
}

impl Side {
    fn new(arguments: &Arguments, world: &ProcessGroup) -> Result<Self, Failure> {
        let layers = arguments.layers;
        if arguments.engine == "eager" {
            let device = Device::flex().autodiff().gradient_checkpointing();
            let policy = ShardPolicy::new().units(["encoder.layers.*"]);
            let model = fully_shard(config(layers).init(&device), world, policy)?;
            return Ok(Self::Eager(
                Box::new(Some(model)),
                AdamWConfig::new().init(),
            ));
        }
        let strategy = match arguments.ranks {
            1 => Strategy::NoShard,
            _ => Strategy::FullShard,
        };
        let options = Options::default().kernels(!arguments.composed);
        let mode = Mode::data_parallel(world.clone(), strategy).options(options);
        let init = move |device: &Device| config(layers).init(device);
        let step = compile(init, EncoderLm::loss, AdamWConfig::new().build(), mode)?;
        Ok(Self::Compiled(Box::new(step)))
    }

    fn train(&mut self, batch: &Tokens) -> Result<f64, Failure> {
        match self {
            Self::Eager(model, optimizer) => {
                let own = model.take().ok_or("the model is kept")?;
                let loss = own.loss(batch.clone());
                let value = loss.clone().into_scalar::<f32>();
                let gradients = backward(loss, &own)?;
                **model = Some(optimizer.step(1e-4, own, gradients));
                Ok(value.into())
            }
            Self::Compiled(step) => Ok(step.step(1e-4, batch)?),
        }
    }
}

/// Prints the time of each operation name in a step, in descending order.
fn profile(step: &mut CompiledStep<Tokens>, batch: &Tokens, prints: bool) -> Result<(), Failure> {
    let (_, timeline) = step.step_with_timeline(1e-4, batch)?;
    let mut by_name: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for span in timeline.spans() {
        // Products are separated by their operands' shapes, because their rates differ.
        let node = step.graph().and_then(|graph| graph.nodes().get(span.node));
        let operands = node.filter(|node| node.name().to_lowercase().ends_with("matmul"));
        let shapes = operands.map(|node| {
            let shapes = node
                .operation
                .inputs()
                .map(|input| format!("{:?}", input.shape.to_vec()));
            shapes.collect::<Vec<_>>().join(" ")
        });
        let name = format!(
            "{} {} {}",
            span.phase,
            span.name,
            shapes.unwrap_or_default()
        );
        let entry = by_name.entry(name).or_default();
        *entry = (entry.0 + 1, entry.1 + span.duration.as_secs_f64());
    }
    let mut rows: Vec<_> = by_name.into_iter().collect();
    rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    for (name, (calls, seconds)) in rows.iter().take(if prints { 40 } else { 0 }) {
        println!("{:9.2} ms {calls:5} {name}", 1e3 * seconds);
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    burn_fsdp::allocator::keep_freed_memory();
    let arguments = Arguments::read();
    let of = arguments.clone();
    let ranks = launch(LaunchConfig::new(arguments.ranks), move |world| {
        run(&of, &world)
    });
    let mut ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    let (mut times, losses) = ranks.swap_remove(0);
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let report = serde_json::json!({
        "engine": arguments.engine,
        "ranks": arguments.ranks,
        "step_ms": 1e3 * median,
        "tokens_per_s": (BATCH * EncoderLmConfig::default().seq) as f64 / median,
        "losses": losses,
    });
    println!("{report}");
    Ok(())
}

/// Returns a rank's rows in a step.
fn rows(world: &ProcessGroup, step: usize) -> Tokens {
    let rows = BATCH / world.size();
    let first = world.rank() * rows;
    EncoderLmConfig::default().batch(step, first..first + rows, &Device::flex())
}

fn run(arguments: &Arguments, world: &ProcessGroup) -> Result<(Vec<f64>, Vec<f64>), Failure> {
    Device::flex().seed(0);
    let mut side = Side::new(arguments, world)?;
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for step in 0..arguments.warmup + arguments.steps {
        let batch = rows(world, step);
        let start = Instant::now();
        losses.push(side.train(&batch)?);
        if step >= arguments.warmup {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    if let Side::Compiled(step) = &mut side {
        let batch = rows(world, 0);
        if arguments.prints && world.rank() == 0 {
            println!("{}", step.graph().ok_or("it has run")?);
        }
        if arguments.profiles {
            profile(step, &batch, world.rank() == 0)?;
        }
    }
    Ok((times, losses))
}
