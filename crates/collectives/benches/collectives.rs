//! How fast collectives are against plain copying.
//!
//! For each size the ranks take turns, all at once, at copying a full tensor each (`memcpy`), at an
//! all-gather and at a reduce-scatter of it. A turn lasts from when the first rank begins until the
//! last is done. The ratio is the time of the copy over that of the collective of the same round, so
//! that what else the machine does strikes both.
//!
//! ```text
//! cargo bench -p burn-fsdp-collectives -- [--ranks N] [--rounds N] [--json FILE]
//! ```

use std::hint::black_box;
use std::time::Instant;

use burn_fsdp_collectives::{
    ElementType, Error, LaunchConfig, Part, Partition, ProcessGroup, Reduction, Source, launch,
};

#[path = "../../../benches/run.rs"]
mod run;

/// Bytes of the full tensors.
const SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// What is measured in each round, in this order.
const KINDS: [&str; 3] = ["memcpy", "all_gather", "reduce_scatter"];

/// Seconds that each kind took in each round.
type Rounds = Vec<[f64; KINDS.len()]>;

/// When one rank began and ended each kind in each round.
type Spans = Vec<[Span; KINDS.len()]>;

#[derive(Clone, Copy)]
struct Span {
    start: Instant,
    end: Instant,
}

struct Options {
    ranks: usize,
    rounds: Option<usize>,
    json: Option<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::read()?;
    let Options { ranks, rounds, .. } = options;
    let measured = launch(LaunchConfig::new(ranks), move |world| {
        let of_size = |size: &usize| measure(&world, *size, rounds);
        SIZES.iter().map(of_size).collect::<Result<Vec<_>, Error>>()
    })?;
    let run = run::Run::here("collectives");
    println!("{run}");
    println!("{ranks} ranks; GB/s of the full tensor; ratio to memcpy: median (quartiles)");
    println!(
        "{:>10} {:>8}   {:<32} {:<32}",
        "KiB", KINDS[0], KINDS[1], KINDS[2]
    );
    let mut raw = vec![run.to_json()];
    for (index, size) in SIZES.into_iter().enumerate() {
        let rounds = turns(measured.iter().map(|sizes| &sizes[index]));
        print_row(size, &rounds);
        raw.push(
            serde_json::json!({ "ranks": ranks, "bytes": size, "kinds": KINDS, "seconds": rounds }),
        );
    }
    if let Some(path) = options.json {
        std::fs::write(path, serde_json::to_string_pretty(&raw)?)?;
    }
    Ok(())
}

impl Options {
    fn read() -> Result<Self, Box<dyn std::error::Error>> {
        let mut options = Self {
            ranks: 2,
            rounds: None,
            json: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--ranks" => options.ranks = value()?.parse()?,
                "--rounds" => options.rounds = Some(value()?.parse()?),
                "--json" => options.json = Some(value()?),
                // Cargo's own.
                "--bench" => {}
                _ => return Err(format!("there is no option {argument}").into()),
            }
        }
        Ok(options)
    }
}

/// One rank's turns with tensors of `size` bytes.
fn measure(world: &ProcessGroup, size: usize, rounds: Option<usize>) -> Result<Spans, Error> {
    let num_rounds = rounds.unwrap_or((2usize << 30).div_euclid(size).clamp(31, 501));
    let partition = Partition::flat(size / ElementType::F32.size(), world.size())?;
    let shard_bytes = partition.len(world.rank()) * ElementType::F32.size();
    let values = |len| {
        let mut buffer = world.pool().take(len);
        let floats = bytemuck::cast_slice_mut::<u8, f32>(buffer.as_mut());
        floats
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = (i % 97) as f32);
        Source::new(buffer)
    };
    let (full, shard) = (values(size), values(shard_bytes));
    let part = |source: &Source| vec![Part::new(source.clone(), partition, ElementType::F32)];
    let timed = |turn: &dyn Fn() -> Result<(), Error>| {
        world.barrier("turn")?;
        let start = Instant::now();
        turn()?;
        Ok::<_, Error>(Span {
            start,
            end: Instant::now(),
        })
    };
    let memcpy = || {
        let mut into = world.pool().take(size);
        into.as_mut().copy_from_slice(black_box(full.as_bytes()));
        black_box(into.as_ref());
        Ok(())
    };
    let all_gather = || {
        let into = vec![world.pool().take(size)];
        black_box(world.all_gather("gather", Vec::new(), part(&shard), into)?);
        Ok(())
    };
    let reduce_scatter = || {
        let (mean, into) = (
            Reduction::mean(world.size()),
            vec![world.pool().take(shard_bytes)],
        );
        black_box(world.reduce_scatter("reduce", Vec::new(), mean, part(&full), into)?);
        Ok(())
    };
    let round = || {
        Ok([
            timed(&memcpy)?,
            timed(&all_gather)?,
            timed(&reduce_scatter)?,
        ])
    };
    // The pool keeps as much as was in use at once: what the turns need one after the other.
    let turns = [size, shard_bytes].map(|len| world.pool().take(len));
    drop(turns);
    let _: [Span; 3] = round()?;
    (0..num_rounds).map(|_| round()).collect()
}

/// From when the first rank begins until the last is done, by round and kind.
fn turns<'a>(ranks: impl Iterator<Item = &'a Spans>) -> Rounds {
    let ranks: Vec<_> = ranks.collect();
    let lasted = |round: usize, kind: usize| {
        let spans = || ranks.iter().map(|rounds| rounds[round][kind]);
        let start = spans().map(|span| span.start).min();
        let end = spans().map(|span| span.end).max();
        end.zip(start)
            .map_or(0.0, |(end, start)| (end - start).as_secs_f64())
    };
    let num_rounds = ranks.first().map_or(0, |rounds| rounds.len());
    (0..num_rounds)
        .map(|round| [0, 1, 2].map(|kind| lasted(round, kind)))
        .collect()
}

fn print_row(size: usize, rounds: &Rounds) {
    let median = |kind: usize| quartiles(rounds.iter().map(|round| round[kind]))[1];
    let gigabytes = |kind: usize| size as f64 / median(kind) / 1e9;
    let against_memcpy = |kind: usize| {
        let [low, middle, high] = quartiles(rounds.iter().map(|round| round[0] / round[kind]));
        format!(
            "{:>7.2} {middle:>6.2} ({low:.2} to {high:.2})",
            gigabytes(kind)
        )
    };
    let copied = gigabytes(0);
    println!(
        "{:>10} {copied:>8.2}   {:<32} {:<32}",
        size >> 10,
        against_memcpy(1),
        against_memcpy(2)
    );
}

/// First quartile, median and third quartile.
fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}
