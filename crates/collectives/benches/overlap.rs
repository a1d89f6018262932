//! The share of a collective that is hidden behind work done while it is in progress.
//!
//! Three times are measured for each size: the collective by itself, work of that length by itself, and both when the
//! collective is started, the work done, and the collective waited for. The ratio is the third time divided by the
//! longer of the first two: 1 means that everything is hidden that can be, 2 means that nothing is. The work is either
//! arithmetic on the rank's own thread, or a wait that represents a device that computes by itself.
//!
//! With ranks as threads, a transfer runs in the wait and nothing is hidden. Over MPI it runs on a separate thread,
//! which needs a share of a core to copy. If no core is free, for example with as many processes as cores over shared
//! memory, one rank's copies take time from another rank's arithmetic.
//!
//! ```text
//! cargo bench -p burn-fsdp-collectives --bench overlap -- [--ranks N] [--rounds N] [--most-mib N] [--json FILE]
//! ```

use std::hint::black_box;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_fsdp_collectives::{
    ElementType, Error, LaunchConfig, Part, Partition, ProcessGroup, Reduction, Source, launch,
    processes,
};

#[path = "../../../benches/origin.rs"]
mod run;

/// Bytes of the full tensors.
const SIZES: [usize; 3] = [4 << 20, 16 << 20, 64 << 20];

const KINDS: [&str; 2] = ["all_gather", "reduce_scatter"];

/// The work that is done during the collective.
#[derive(Clone, Copy, Debug)]
enum Work {
    Arithmetic,
    Device,
}

/// Seconds of one round.
struct Round {
    collective: f64,
    work: f64,
    both: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut ranks, mut rounds, mut most, mut json) = (2, 11, 64 << 20, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--ranks" => ranks = value()?.parse()?,
            "--rounds" => rounds = value()?.parse()?,
            "--most-mib" => most = value()?.parse::<usize>()? << 20,
            "--json" => json = Some(value()?),
            // Cargo's own.
            "--bench" => {}
            _ => return Err(format!("there is no option {argument}").into()),
        }
    }
    let found = processes()?;
    let ranks = found.as_ref().map_or(ranks, |found| found.size);
    let is_first = found.as_ref().is_none_or(|found| found.rank == 0);
    let what = if found.is_some() {
        "processes"
    } else {
        "threads"
    };
    let run = run::Run::here("overlap");
    if is_first {
        println!("{run}");
        println!(
            "{ranks} ranks as {what}; milliseconds, and the time of both over the longer, medians"
        );
        println!(
            "{:>8} {:<15} {:<11} {:>10} {:>8} {:>8} {:>6}",
            "KiB", "operation", "work", "collective", "work", "both", "ratio"
        );
    }
    let rows = launch(LaunchConfig::new(ranks), move |world| {
        let mut rows = Vec::new();
        for size in SIZES.into_iter().filter(|size| *size <= most) {
            for kind in KINDS {
                for work in [Work::Arithmetic, Work::Device] {
                    let row = measure(&world, kind, size, work, rounds)?;
                    if is_first && world.rank() == 0 {
                        print_row(size, kind, work, &row);
                    }
                    rows.push((size, kind, work, row));
                }
            }
        }
        Ok::<_, Error>(rows)
    })?;
    if let Some(path) = json.filter(|_| is_first) {
        let row = |(size, kind, work, rounds): &(usize, &str, Work, Vec<Round>)| {
            let seconds: Vec<_> = rounds
                .iter()
                .map(|round| [round.collective, round.work, round.both])
                .collect();
            serde_json::json!({ "bytes": size, "kind": kind, "work": format!("{work:?}"), "seconds": seconds })
        };
        let mut raw = vec![run.to_json()];
        raw.extend(rows[0].iter().map(row));
        std::fs::write(path, serde_json::to_string_pretty(&raw)?)?;
    }
    Ok(())
}

/// Runs one rank's rounds.
fn measure(
    world: &ProcessGroup,
    kind: &str,
    size: usize,
    work: Work,
    num_rounds: usize,
) -> Result<Vec<Round>, Error> {
    let partition = Partition::flat(size / ElementType::F32.size(), world.size())?;
    let shard_bytes = partition.len(world.rank()) * ElementType::F32.size();
    let gather = kind == KINDS[0];
    let own = Source::new(vec![1u8; if gather { shard_bytes } else { size }]);
    let start = || {
        let part = vec![Part::new(own.clone(), partition, ElementType::F32)];
        let into = vec![world.pool().take(if gather { size } else { shard_bytes })];
        if gather {
            world.start_all_gather("gather", Vec::new(), part, into)
        } else {
            world.start_reduce_scatter("reduce", Vec::new(), Reduction::sum(), part, into)
        }
    };
    let timed = |what: &dyn Fn() -> Result<(), Error>| {
        world.barrier("turn")?;
        let began = Instant::now();
        what()?;
        // A step takes as long as on the slowest rank.
        let lasted = began.elapsed().as_secs_f64();
        let notes = world.exchange("lasted", lasted.to_le_bytes().to_vec())?;
        let seconds = notes.iter().filter_map(|note| note.first_chunk());
        let seconds = seconds.map(|bytes| f64::from_le_bytes(*bytes));
        Ok::<_, Error>(seconds.fold(0.0, f64::max))
    };
    let alone = || {
        drop(black_box(start()?.wait()?));
        Ok(())
    };
    timed(&alone)?;
    let mut first: Vec<f64> = (0..5).map(|_| timed(&alone)).collect::<Result<_, _>>()?;
    first.sort_by(f64::total_cmp);
    let target = Duration::from_secs_f64(first[2]);
    // As much arithmetic as fits the time on an idle machine, and the same amount each time.
    let amount = calibrate(target);
    let busy = || match work {
        Work::Arithmetic => arithmetic(amount),
        Work::Device => sleep(target),
    };
    let round = || {
        Ok(Round {
            collective: timed(&alone)?,
            work: timed(&|| {
                busy();
                Ok(())
            })?,
            both: timed(&|| {
                let pending = start()?;
                busy();
                drop(black_box(pending.wait()?));
                Ok(())
            })?,
        })
    };
    (0..num_rounds).map(|_| round()).collect()
}

/// Computes products and sums that stay in a core's cache.
fn arithmetic(amount: usize) {
    let mut values = [1.0f32; 1024];
    for _ in 0..amount {
        for value in &mut values {
            *value = black_box(value.mul_add(0.999, 0.001));
        }
    }
    black_box(values);
}

fn calibrate(target: Duration) -> usize {
    const AMOUNT: usize = 2000;
    let times = (0..7).map(|_| {
        let began = Instant::now();
        arithmetic(AMOUNT);
        began.elapsed().as_secs_f64()
    });
    let least = times.fold(f64::MAX, f64::min);
    (target.as_secs_f64() / least * AMOUNT as f64) as usize + 1
}

fn print_row(size: usize, kind: &str, work: Work, rounds: &[Round]) {
    let median = |of: &dyn Fn(&Round) -> f64| {
        let mut values: Vec<_> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let ratio = |round: &Round| round.both / round.collective.max(round.work);
    println!(
        "{:>8} {kind:<15} {:<11} {:>10.2} {:>8.2} {:>8.2} {:>6.2}",
        size >> 10,
        format!("{work:?}"),
        median(&|round| round.collective * 1e3),
        median(&|round| round.work * 1e3),
        median(&|round| round.both * 1e3),
        median(&ratio),
    );
}
