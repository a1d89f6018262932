//! The speed of collectives compared with plain copying.
//!
//! For each size all ranks run the same turns at once: copying a full tensor each (`memcpy`), and each collective on
//! such a tensor. A turn lasts from the first rank's beginning until the last rank is done. The ratio is the time of
//! the copy divided by the time of the collective. Both are from the same round, so other load on the machine affects
//! both.
//!
//! Ranks are threads. With the feature `mpi` and under `mpirun` on one machine, they are processes.
//!
//! ```text
//! cargo bench -p burn-fsdp-collectives -- [--ranks N] [--rounds N] [--json FILE]
//! ```

use std::hint::black_box;
use std::time::{SystemTime, UNIX_EPOCH};

use burn_fsdp_collectives::{
    CrossPart, ElementType, Error, FullPart, LaunchConfig, Part, Partition, ProcessGroup,
    Reduction, Source, launch, processes,
};

#[path = "../../../benches/origin.rs"]
mod run;

/// Bytes of the full tensors.
const SIZES: [usize; 7] = [
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
];

/// The measurements of each round, in this order.
const KINDS: [&str; 5] = [
    "memcpy",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
];

/// Seconds of each kind in each round.
type Rounds = Vec<[f64; KINDS.len()]>;

/// The begin and end of each kind in each round on one rank.
type Spans = Vec<[Span; KINDS.len()]>;

/// Seconds of a clock that all processes of the machine share.
#[derive(Clone, Copy)]
struct Span {
    start: f64,
    end: f64,
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

struct Options {
    ranks: usize,
    rounds: Option<usize>,
    json: Option<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::read()?;
    let rounds = options.rounds;
    let found = processes()?;
    let ranks = found.as_ref().map_or(options.ranks, |found| found.size);
    let measured = launch(LaunchConfig::new(ranks), move |world| {
        let of_size = |size: &usize| turns(&world, &measure(&world, *size, rounds)?);
        SIZES.iter().map(of_size).collect::<Result<Vec<_>, Error>>()
    })?;
    if found.is_some_and(|found| found.rank > 0) {
        return Ok(());
    }
    let run = run::Run::here("collectives");
    println!("{run}");
    println!("{ranks} ranks; GB/s of the full tensor; ratio to memcpy: median (quartiles)");
    print!("{:>10} {:>8}", "KiB", KINDS[0]);
    KINDS[1..].iter().for_each(|kind| print!("   {kind:<29}"));
    println!();
    let mut raw = vec![run.to_json()];
    for (index, size) in SIZES.into_iter().enumerate() {
        // The same on all ranks.
        let rounds = &measured[0][index];
        print_row(size, rounds);
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

/// Runs one rank's turns with tensors of `size` bytes.
fn measure(world: &ProcessGroup, size: usize, rounds: Option<usize>) -> Result<Spans, Error> {
    let num_rounds = rounds.unwrap_or((2usize << 30).div_euclid(size).clamp(15, 501));
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
        let start = now();
        turn()?;
        Ok::<_, Error>(Span { start, end: now() })
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
    let all_reduce = || {
        let (mean, into) = (Reduction::mean(world.size()), vec![world.pool().take(size)]);
        let parts = vec![FullPart::new(full.clone(), ElementType::F32)];
        black_box(world.all_reduce("all reduce", Vec::new(), mean, parts, into)?);
        Ok(())
    };
    // Of a matrix that is as square as possible, rows go out and columns come in.
    let elements = size / ElementType::F32.size();
    let side = 1usize << (elements.ilog2() / 2);
    let rows = Partition::flat(side, world.size())?;
    let columns = Partition::flat(elements / side, world.size())?;
    let bytes_of = |of: usize| of * ElementType::F32.size();
    let given = values(bytes_of(rows.len(world.rank()) * (elements / side)));
    let taken = bytes_of(side * columns.len(world.rank()));
    let all_to_all = || {
        let parts = vec![CrossPart::new(
            given.clone(),
            rows,
            columns,
            ElementType::F32,
        )];
        let into = vec![world.pool().take(taken)];
        black_box(world.all_to_all("cross", Vec::new(), parts, into)?);
        Ok(())
    };
    let round = || {
        Ok([
            timed(&memcpy)?,
            timed(&all_gather)?,
            timed(&reduce_scatter)?,
            timed(&all_reduce)?,
            timed(&all_to_all)?,
        ])
    };
    // The pool keeps as much memory as was in use at once: enough for the consecutive turns.
    let turns = [size, shard_bytes].map(|len| world.pool().take(len));
    drop(turns);
    let _: [Span; KINDS.len()] = round()?;
    (0..num_rounds).map(|_| round()).collect()
}

/// Returns the duration of each turn, from the first rank's beginning until the last rank was done, on all ranks.
fn turns(world: &ProcessGroup, own: &Spans) -> Result<Rounds, Error> {
    let spans = own.iter().flatten();
    let numbers: Vec<f64> = spans.flat_map(|span| [span.start, span.end]).collect();
    let notes = world.exchange("spans", bytemuck::cast_slice(&numbers).to_vec())?;
    let ranks: Vec<Vec<f64>> = notes
        .iter()
        .map(|note| {
            let numbers = note.chunks_exact(size_of::<f64>());
            numbers.map(bytemuck::pod_read_unaligned).collect()
        })
        .collect();
    let lasted = |round: usize, kind: usize| {
        let at = 2 * (round * KINDS.len() + kind);
        let start = ranks.iter().map(|rank| rank[at]).fold(f64::MAX, f64::min);
        let end = ranks.iter().map(|rank| rank[at + 1]).fold(0.0, f64::max);
        (end - start).max(1e-9)
    };
    let rounds = 0..own.len();
    Ok(rounds
        .map(|round| std::array::from_fn(|kind| lasted(round, kind)))
        .collect())
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
    print!("{:>10} {:>8.2}", size >> 10, gigabytes(0));
    for kind in 1..KINDS.len() {
        print!("   {:<29}", against_memcpy(kind));
    }
    println!();
}

/// Returns the first quartile, the median and the third quartile.
fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}
