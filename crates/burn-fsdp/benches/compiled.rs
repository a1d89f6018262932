//! One training step of a GPT on several ranks: the compiled step compared with the eager engine, both fully sharded,
//! in one process and in interleaved pairs.
//!
//! ```text
//! cargo bench -p burn-fsdp --bench compiled -- [--ranks N] [--pairs N] [--json FILE]
//! [--composed] [--no-recompute] [--profile]
//! ```
//!
//! First, it measures bytes with the allocator, for each side separately and for all ranks together: the bytes between
//! steps, and the peak of one step. Then it measures the time of pairs of steps. It prints the median of their ratios
//! with its 95 % interval, and the limits of the same run: copying all parameters, and matrix products. `--composed`
//! traces elementary operations instead of fused ones. The file of raw results starts with commit, machine and flags.

use std::collections::BTreeMap;

use burn::tensor::Device;
use burn_fsdp::compile::{CompiledStep, Options};
use burn_fsdp::internals::plan::{Machine, Plan, Size};
use burn_fsdp::plan::MemoryPlan;
use burn_fsdp::{LaunchConfig, ProcessGroup, launch};
use limits::Limits;
use peak_alloc::PeakAlloc;
use run::Run;
use sides::{BATCH, CONFIG, Compiled, Eager, Failure, Operations, Side, Tokens, devices, rows};
use times::{Begun, Middle, Millis};

#[path = "../../../benches/flags.rs"]
mod flags;
#[path = "../../../benches/limits.rs"]
mod limits;
#[path = "../../../benches/origin.rs"]
mod run;
mod sides;
#[path = "../../../benches/times.rs"]
mod times;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WARMUP: usize = 3;

#[derive(Debug, Clone)]
struct Arguments {
    ranks: usize,
    pairs: usize,
    json: Option<String>,
    operations: Operations,
    is_recomputed: bool,
    is_profiled: bool,
}

impl Arguments {
    fn read() -> Self {
        let mut arguments = Self {
            ranks: 2,
            pairs: 24,
            json: None,
            operations: Operations::Fused,
            is_recomputed: true,
            is_profiled: false,
        };
        flags::for_each(|flag, value| match flag {
            "--ranks" => arguments.ranks = value.number(),
            "--pairs" => arguments.pairs = value.number(),
            "--json" => arguments.json = value.text(),
            "--composed" => arguments.operations = Operations::Elementary,
            "--no-recompute" => arguments.is_recomputed = false,
            "--profile" => arguments.is_profiled = true,
            _ => {}
        });
        arguments
    }

    fn options(&self) -> Options {
        let mut options = Options::default();
        if !self.is_recomputed {
            options.recompute = None;
        }
        options
    }
}

/// The bytes of one side on all ranks together.
#[derive(Debug, Clone, Copy)]
struct Bytes {
    at_rest: usize,
    peak: usize,
}

/// Runs a few steps on one side, and measures the next step between barriers.
fn bytes<S: Side>(
    world: &ProcessGroup,
    device: &Device,
    new: impl FnOnce() -> Result<S, Failure>,
) -> Result<Bytes, Failure> {
    world.barrier("begin")?;
    let before = ALLOCATOR.current_usage();
    world.barrier("begun")?;
    let mut side = new()?;
    for step in 0..WARMUP {
        side.train(&rows(world, BATCH, step, device))?;
    }
    let batch = rows(world, BATCH, WARMUP, device);
    world.barrier("rest")?;
    let at_rest = ALLOCATOR.current_usage() - before;
    world.barrier("reset")?;
    ALLOCATOR.reset_peak_usage();
    world.barrier("measure")?;
    side.train(&batch)?;
    world.barrier("measured")?;
    let peak = ALLOCATOR.peak_usage() - before;
    world.barrier("end")?;
    drop(side);
    world.barrier("ended")?;
    Ok(Bytes { at_rest, peak })
}

/// Times one step, from the start of all ranks to the end of the last rank.
fn time(world: &ProcessGroup, side: &mut dyn Side, batch: &Tokens) -> Result<Millis, Failure> {
    world.barrier("start of a step")?;
    let begun = Begun::now();
    world.barrier("clocks are read")?;
    side.train(batch)?;
    world.barrier("end of a step")?;
    let millis = begun.elapsed();
    world.barrier("clocks are read again")?;
    Ok(millis)
}

struct Measured {
    eager: Bytes,
    compiled: Bytes,
    /// Milliseconds of the eager and the compiled step.
    pairs: Vec<[Millis; 2]>,
    losses: [f64; 2],
    /// Planned peak of this rank.
    planned_peak: u64,
    /// The same without recomputation.
    kept_peak: u64,
    plan: String,
    profile: String,
    limits: Limits,
}

fn measure(world: &ProcessGroup, arguments: &Arguments) -> Result<Measured, Failure> {
    let [tracked, plain] = devices();
    let eager = bytes(world, &tracked, || Eager::new(world))?;
    let compiled = bytes(world, &plain, || {
        Compiled::new(world, arguments.operations, arguments.options())
    })?;
    let mut sides = (
        Eager::new(world)?,
        Compiled::new(world, arguments.operations, arguments.options())?,
    );
    for step in 0..WARMUP {
        sides.0.train(&rows(world, BATCH, step, &tracked))?;
        sides.1.train(&rows(world, BATCH, step, &plain))?;
    }
    let mut pairs = Vec::new();
    for pair in 0..arguments.pairs.max(1) {
        let step = WARMUP + pair;
        let (first, second) = (
            rows(world, BATCH, step, &tracked),
            rows(world, BATCH, step, &plain),
        );
        // The first side alternates, so a drift of the machine favors neither.
        pairs.push(match pair % 2 {
            0 => {
                let eager = time(world, &mut sides.0, &first)?;
                [eager, time(world, &mut sides.1, &second)?]
            }
            _ => {
                let compiled = time(world, &mut sides.1, &second)?;
                [time(world, &mut sides.0, &first)?, compiled]
            }
        });
    }
    let losses = [
        sides.0.train(&rows(world, BATCH, 0, &tracked))?,
        sides.1.train(&rows(world, BATCH, 0, &plain))?,
    ];
    let step = &mut sides.1.0;
    let graph = step.compile_for(1e-3, &rows(world, BATCH, 0, &plain))?;
    let plan = Plan::new(&graph, &Machine::cpu(), world.rank())?;
    let mut keeping = Options::default();
    keeping.recompute = None;
    // The first optimizer step has a graph of its own, so this compares later steps.
    let mut keeping = Compiled::new(world, arguments.operations, keeping)?;
    keeping.train(&rows(world, BATCH, 0, &plain))?;
    let kept = keeping
        .0
        .compile_for(1e-3, &rows(world, BATCH, 0, &plain))?;
    let kept_peak = MemoryPlan::new(&kept, world.rank())?.peak_bytes();
    let profile = if arguments.is_profiled {
        profile(step, &rows(world, BATCH, 0, &plain))?
    } else {
        String::new()
    };
    Ok(Measured {
        eager,
        compiled,
        pairs,
        losses,
        planned_peak: plan.memory.peak_bytes(),
        kept_peak,
        plan: plan.to_string(),
        profile,
        limits: Limits::measure(world, &Device::flex())?,
    })
}

/// Returns the slowest operations of a step.
fn profile(step: &mut CompiledStep<Tokens>, batch: &Tokens) -> Result<String, Failure> {
    let (_, timeline) = step.step_with_timeline(1e-3, batch)?;
    let mut by_name = BTreeMap::<String, (f64, usize)>::new();
    for span in timeline.spans() {
        let name = span.name.split(' ').next().unwrap_or_default();
        let entry = by_name.entry(format!("{} {name}", span.phase)).or_default();
        entry.0 += span.duration.as_secs_f64() * 1e3;
        entry.1 += 1;
    }
    let mut by_name: Vec<_> = by_name.into_iter().collect();
    by_name.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let lines = by_name.iter().take(24);
    let lines = lines.map(|(name, (time, count))| format!("  {time:8.2} ms {count:5} {name}\n"));
    Ok(lines.collect())
}

fn main() {
    burn_fsdp::allocator::keep_freed_memory();
    let arguments = Arguments::read();
    let on_ranks = arguments.clone();
    let results = launch(LaunchConfig::new(arguments.ranks), move |world| {
        measure(&world, &on_ranks)
    });
    let results = results.unwrap_or_else(|error| panic!("{error}"));
    let Measured {
        eager,
        compiled,
        pairs,
        planned_peak,
        kept_peak,
        plan,
        profile,
        limits,
        ..
    } = &results[0];
    let run = Run::here("compiled");
    println!("{run}");
    // The eager engine returns the loss of each rank's own rows.
    let mean = |side: usize| {
        let sum: f64 = results.iter().map(|result| result.losses[side]).sum();
        sum / results.len() as f64
    };
    let megabytes = |bytes: usize| bytes as f64 / 1e6;
    println!(
        "{} ranks, {} pairs, {arguments:?}",
        arguments.ranks,
        pairs.len()
    );
    println!("losses    eager {:.6}, compiled {:.6}", mean(0), mean(1));
    for (name, bytes) in [("eager", eager), ("compiled", compiled)] {
        let (rest, peak) = (megabytes(bytes.at_rest), megabytes(bytes.peak));
        println!("{name:<9} {rest:9.1} MB between steps, {peak:9.1} MB at the peak, all ranks");
    }
    let memory = compiled.peak as f64 / eager.peak as f64;
    println!("peak      {memory:9.3} of eager's");
    let [eager_ms, compiled_ms] =
        [0, 1].map(|side| Middle::of(pairs.iter().map(|pair| pair[side].clock)).median);
    let ratio = Middle::of(pairs.iter().map(|pair| pair[1].clock / pair[0].clock));
    println!("eager     {eager_ms:9.1} ms a step (median)");
    println!("compiled  {compiled_ms:9.1} ms a step (median)");
    println!("time, of eager's      {ratio}");
    let used = pairs
        .iter()
        .map(|pair| pair[1].processors / pair[0].processors);
    let used = Middle::of(used);
    println!("processor, of eager's {used}");
    let (params, tokens) = (CONFIG.num_params(), BATCH * CONFIG.seq);
    let beside = limits::beside(limits, params, tokens, arguments.ranks, compiled_ms);
    println!("{beside}");
    let [planned, kept] = [planned_peak, kept_peak].map(|bytes| Size(*bytes).trimmed());
    println!("\nrecomputed: planned peak {planned}, without it {kept}\n{plan}\n{profile}");
    if let Some(path) = arguments.json {
        let raw = pairs
            .iter()
            .map(|[eager, compiled]| [eager.clock, compiled.clock]);
        let text = serde_json::json!({
            "run": run.to_json(),
            "ranks": arguments.ranks,
            "time_ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
            "processor_ratio": used.median,
            "memory_ratio": memory,
            "eager_peak_bytes": eager.peak,
            "compiled_peak_bytes": compiled.peak,
            "copy_bytes_per_s": limits.copy,
            "products_flops_per_s": limits.products,
            "eager_compiled_ms": raw.collect::<Vec<_>>(),
        });
        std::fs::write(&path, format!("{text}\n"))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}
