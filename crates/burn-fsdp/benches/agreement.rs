//! The cost of comparing bytes between ranks: one training step of a GPT with [`Check::Agreement`], compared with the
//! same step without it, in both engines, in one process and in interleaved pairs.
//!
//! ```text
//! cargo bench -p burn-fsdp --bench agreement -- [--ranks N] [--batch N] [--pairs N] [--json FILE]
//! ```
//!
//! The ranks of two launches take turns, so each step has the machine for itself. Prints the median of the pairs'
//! ratios with its 95 % interval, for wall time and processor time, and the limits of the same run.

use std::sync::{Arc, Barrier};

use burn::tensor::Device;
use burn_fsdp::compile::Options;
use burn_fsdp::{Check, LaunchConfig, ProcessGroup, launch};
use limits::Limits;
use run::Run;
use sides::{BATCH, CONFIG, Compiled, Eager, Failure, Operations, Side, devices, rows};
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

const WARMUP: usize = 3;
const ENGINES: [&str; 2] = ["eager", "compiled"];

#[derive(Debug, Clone)]
struct Arguments {
    ranks: usize,
    batch: usize,
    pairs: usize,
    json: Option<String>,
}

impl Arguments {
    fn read() -> Self {
        let mut arguments = Self {
            ranks: 2,
            batch: BATCH,
            pairs: 24,
            json: None,
        };
        flags::for_each(|flag, value| match flag {
            "--ranks" => arguments.ranks = value.number(),
            "--batch" => arguments.batch = value.number(),
            "--pairs" => arguments.pairs = value.number(),
            "--json" => arguments.json = value.text(),
            _ => {}
        });
        arguments
    }
}

/// The turns of the ranks of both launches. No rank is in a step during the other launch's turn.
struct Turns(Barrier);

impl Turns {
    /// Returns the time of the step of the ranks whose turn it is.
    fn next(&self, mine: Option<impl FnOnce()>) -> Millis {
        self.0.wait();
        let begun = Begun::now();
        // No rank starts its step before all have read the clocks.
        self.0.wait();
        if let Some(step) = mine {
            step();
        }
        self.0.wait();
        let elapsed = begun.elapsed();
        self.0.wait();
        elapsed
    }
}

/// Returns the times of one launch's steps, by engine.
fn measure(
    world: &ProcessGroup,
    check: Check,
    arguments: &Arguments,
    turns: &Turns,
) -> Result<[Vec<Millis>; 2], Failure> {
    let [tracked, plain] = devices();
    let mut eager = Eager::new(world)?;
    let mut compiled = Compiled::new(world, Operations::Fused, Options::default())?;
    let mut times = [Vec::new(), Vec::new()];
    for step in 0..WARMUP + arguments.pairs {
        let batches = [&tracked, &plain].map(|device| rows(world, arguments.batch, step, device));
        let sides: [&mut dyn Side; 2] = [&mut eager, &mut compiled];
        for (engine, (side, batch)) in sides.into_iter().zip(&batches).enumerate() {
            for turn in 0..2 {
                // The first side alternates, so a drift of the machine favors neither.
                let is_mine = (turn + step) % 2 == usize::from(check == Check::Agreement);
                let train = || {
                    side.train(batch).unwrap_or_else(|error| fail(&error));
                };
                let time = turns.next(is_mine.then_some(train));
                if is_mine && step >= WARMUP {
                    times[engine].push(time);
                }
            }
        }
    }
    Ok(times)
}

/// Ends the process, because the ranks of the other launch would wait for their turn.
fn fail(error: &dyn std::fmt::Display) -> ! {
    eprintln!("{error}");
    std::process::exit(1)
}

fn main() {
    burn_fsdp::allocator::keep_freed_memory();
    let arguments = Arguments::read();
    let limits = launch(LaunchConfig::new(arguments.ranks), |world| {
        Limits::measure(&world, &Device::flex())
    });
    let limits = limits.unwrap_or_else(|error| fail(&error));
    let turns = Arc::new(Turns(Barrier::new(2 * arguments.ranks)));
    let launches = [Check::Calls, Check::Agreement].map(|check| {
        let (arguments, turns) = (arguments.clone(), turns.clone());
        std::thread::spawn(move || {
            let config = LaunchConfig::new(arguments.ranks).check(check);
            let times = launch(config, move |world| {
                measure(&world, check, &arguments, &turns)
            });
            let mut times = times.unwrap_or_else(|error| fail(&error));
            times.swap_remove(0)
        })
    });
    let [without, with] = launches.map(|launch| launch.join().expect("a launch fails as it ends"));
    let run = Run::here("agreement");
    println!("{run}");
    println!(
        "{} ranks, {} pairs, {arguments:?}",
        arguments.ranks, arguments.pairs
    );
    let mut raw = serde_json::Map::new();
    for (engine, (without, with)) in ENGINES.iter().zip(without.iter().zip(&with)) {
        let pairs = || with.iter().zip(without);
        let clock = Middle::of(pairs().map(|(with, without)| with.clock / without.clock));
        let processors = pairs().map(|(with, without)| with.processors / without.processors);
        let processors = Middle::of(processors);
        let plain = Middle::of(without.iter().map(|time| time.clock)).median;
        println!("{engine:<9} {plain:9.1} ms a step without (median)");
        println!("  with it, of that time           {clock}");
        println!("  with it, of that processor time {processors}");
        let (params, tokens) = (CONFIG.num_params(), arguments.batch * CONFIG.seq);
        let beside = limits::beside(&limits[0], params, tokens, arguments.ranks, plain);
        println!("{beside}");
        let pairs = pairs().map(|(with, without)| {
            let clocks = [with.clock, without.clock];
            (clocks, [with.processors, without.processors])
        });
        let of_engine = serde_json::json!({
            "time_ratio": clock.median,
            "interval": [clock.low, clock.high],
            "processor_ratio": processors.median,
            "processor_interval": [processors.low, processors.high],
            "with_without_clock_processor_ms": pairs.collect::<Vec<_>>(),
        });
        raw.insert((*engine).to_owned(), of_engine);
    }
    if let Some(path) = &arguments.json {
        raw.insert("run".to_owned(), run.to_json());
        raw.insert("ranks".to_owned(), arguments.ranks.into());
        raw.insert("batch".to_owned(), arguments.batch.into());
        let text = serde_json::Value::from(raw);
        std::fs::write(path, format!("{text}\n")).unwrap_or_else(|error| fail(&error));
    }
}
