//! The speed of saving and loading steps, compared with plain writing and reading of the same number of bytes.
//!
//! The model has 50 million parameters with the two moments of AdamW (600 MB), on ranks that are threads. In each round
//! all ranks run these turns at once:
//!
//! - `raw_write`: writing the same bytes into one file per rank, in blocks of 16 MiB, then fsync;
//! - `save`: a whole save, from the bytes in memory to the committed step;
//! - `raw_read_cold`, `load_cold`: reading the step's files, one for each rank, and a whole load. The files were
//!   dropped from the page cache before (by `dd iflag=nocache`; a hypervisor may still have them);
//! - `raw_read_warm`, `load_warm`: the same just after the files were read.
//!
//! Loads verify every checksum and fill existing buffers, like a model's. The raw reads fill one block repeatedly.
//! Ratios are raw time divided by the crate's time in the same round, so other load on the machine affects both.
//!
//! ```text
//! cargo bench -p burn-fsdp-checkpoint --bench disk -- [--ranks N] [--rounds N] [--params N] [--dir DIR] [--json FILE]
//! ```

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_fsdp_checkpoint::{
    BoxError, Checkpoints, Dtype, Layout, Mesh, PartBytes, Region, SaveRequest, Source, Step,
    TensorKind, TensorSpec, ThreadRendezvous, TrainingState, Verification, WritePlan, save,
};

#[path = "../../../benches/origin.rs"]
mod run;

const BLOCK: usize = 16 << 20;

/// The measurements of each round.
const KINDS: [&str; 7] = [
    "raw_write",
    "save",
    "raw_read_cold",
    "load_cold",
    "raw_read_warm",
    "load_warm",
    "load_warm_unverified",
];

/// Pairs of the crate's work and the limit that the disk sets.
const RATIOS: [(&str, &str); 4] = [
    ("save", "raw_write"),
    ("load_cold", "raw_read_cold"),
    ("load_warm", "raw_read_warm"),
    ("load_warm_unverified", "raw_read_warm"),
];

type Failure = BoxError;

struct Options {
    ranks: usize,
    rounds: usize,
    params: usize,
    dir: PathBuf,
    json: Option<PathBuf>,
}

fn main() -> Result<(), Failure> {
    let options = Options::read()?;
    let mesh = Mesh::line("shard", options.ranks)?;
    let plan = Arc::new(WritePlan::new(&mesh, tensors(&mesh, options.params)?)?);
    let dir = tempfile::Builder::new()
        .prefix("checkpoint-bench.")
        .tempdir_in(&options.dir)?;
    let mut bench = Bench::new(plan, dir.path());
    let payload: usize = bench.held.iter().flatten().map(Vec::len).sum();
    let run = run::Run::here("checkpoint");
    println!("{run}");
    println!(
        "{} ranks, {payload} bytes of tensors, {} rounds",
        options.ranks, options.rounds
    );
    // The first round also pays for fresh blocks of the disk.
    bench.round()?;
    let rounds = (0..options.rounds).map(|_| bench.round());
    let rounds = rounds.collect::<Result<Vec<_>, _>>()?;
    let mut lines = vec![run.to_json()];
    for (index, kind) in KINDS.iter().enumerate() {
        let seconds: Vec<f64> = rounds.iter().map(|round| round[index]).collect();
        let speed = payload as f64 / median(&seconds) / 1e9;
        println!("{kind:<22} {speed:6.2} GB/s");
        lines.push(serde_json::json!({
            "benchmark": "checkpoint", "op": kind, "ranks": options.ranks, "params": options.params,
            "payload_bytes": payload, "seconds": seconds, "gb_per_s": speed,
        }));
    }
    for (kind, limit) in RATIOS {
        let at = |name| KINDS.iter().position(|kind| *kind == name).unwrap_or(0);
        let ratios: Vec<f64> = rounds.iter().map(|r| r[at(limit)] / r[at(kind)]).collect();
        let ratio = median(&ratios);
        println!("{kind:<22} {ratio:6.3} of {limit}");
        lines.push(serde_json::json!({
            "benchmark": "checkpoint", "op": kind, "limit": limit, "fraction_of_limit": ratio,
            "fractions": ratios,
        }));
    }
    if let Some(path) = options.json {
        let text: Vec<_> = lines.iter().map(ToString::to_string).collect();
        std::fs::write(path, text.join("\n") + "\n")?;
    }
    Ok(())
}

/// Returns layers of square matrices with biases, and their moments.
fn tensors(mesh: &Mesh, params: usize) -> Result<Vec<TensorSpec>, Failure> {
    const DIM: usize = 512;
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[usize]| -> Result<(), Failure> {
        for (prefix, kind) in [
            ("", TensorKind::Parameter),
            ("moment_1/", TensorKind::OptimizerState),
            ("moment_2/", TensorKind::OptimizerState),
        ] {
            let layout = Layout::flat(mesh, "shard")?;
            let name = format!("{prefix}{name}");
            tensors.push(TensorSpec::new(name, shape, Dtype::F32, kind, layout));
        }
        Ok(())
    };
    let per_layer = 4 * DIM * DIM + 4 * DIM;
    for layer in 0..params.div_ceil(per_layer) {
        add(format!("layers.{layer}.weight"), &[4 * DIM, DIM])?;
        add(format!("layers.{layer}.bias"), &[4 * DIM])?;
    }
    Ok(tensors)
}

struct Bench {
    plan: Arc<WritePlan>,
    dir: PathBuf,
    /// By rank, in the order of the plan.
    held: Vec<Vec<Vec<u8>>>,
    /// The buffers that are loaded into, in the same order.
    loaded: Vec<Vec<Vec<u8>>>,
    step: u64,
}

/// A source that returns the parts that a rank holds, without copying.
struct Held<'a> {
    parts: std::slice::Iter<'a, Vec<u8>>,
}

impl Source for Held<'_> {
    fn part(&mut self, _: &TensorSpec, _: &Region) -> Result<PartBytes<'_>, BoxError> {
        Ok(Box::new(self.parts.next().ok_or("no more parts")?))
    }
}

impl Bench {
    fn new(plan: Arc<WritePlan>, dir: &Path) -> Self {
        let mut state = 1u64;
        let mut noise = |len: usize| -> Vec<u8> {
            let mut bytes = Vec::with_capacity(len + 8);
            while bytes.len() < len {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.extend_from_slice(&state.to_le_bytes());
            }
            bytes.truncate(len);
            bytes
        };
        let ranks = 0..plan.mesh().size();
        let parts = |rank| plan.of_rank(rank).iter().map(|part| part.num_bytes);
        let held: Vec<Vec<_>> = ranks
            .map(|rank| parts(rank).map(&mut noise).collect())
            .collect();
        Self {
            loaded: held.clone(),
            held,
            dir: dir.to_owned(),
            plan,
            step: 0,
        }
    }

    fn round(&mut self) -> Result<[f64; KINDS.len()], Failure> {
        self.step += 1;
        // Each goes first in half of the rounds.
        let (raw_write, save) = if self.step.is_multiple_of(2) {
            let save = self.save()?;
            (self.raw_write()?, save)
        } else {
            let raw_write = self.raw_write()?;
            (raw_write, self.save()?)
        };
        let checkpoints = Checkpoints::new(self.dir.join("run"));
        let entries = std::fs::read_dir(checkpoints.path(self.step))?;
        let saved: Vec<_> = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?;
        let mut raw_read_cold = 0.0;
        let mut load_cold = 0.0;
        for is_raw in [self.step.is_multiple_of(2), !self.step.is_multiple_of(2)] {
            drop_from_cache(&saved)?;
            if is_raw {
                raw_read_cold = self.raw_read(&saved)?
            } else {
                load_cold = self.load(Verification::Chunks)?
            }
        }
        let raw_read_warm = self.raw_read(&saved)?;
        let load_warm = self.load(Verification::Chunks)?;
        let load_unverified = self.load(Verification::None)?;
        std::fs::remove_dir_all(self.dir.join("run"))?;
        std::fs::remove_dir_all(self.dir.join("raw"))?;
        // The next measured sync must not pay for the removal.
        File::open(&self.dir)?.sync_all()?;
        Ok([
            raw_write,
            save,
            raw_read_cold,
            load_cold,
            raw_read_warm,
            load_warm,
            load_unverified,
        ])
    }

    fn raw_files(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let dir = self.dir.join("raw");
        (0..self.held.len()).map(move |rank| dir.join(rank.to_string()))
    }

    fn raw_write(&self) -> Result<f64, Failure> {
        std::fs::create_dir_all(self.dir.join("raw"))?;
        // The same bytes: a disk that detects repetitions would process a single repeated block too fast.
        let joined: Vec<Vec<u8>> = self.held.iter().map(|parts| parts.concat()).collect();
        let ranks = joined.iter().zip(self.raw_files());
        timed(ranks, |(bytes, path)| {
            let mut file = File::create_new(path)?;
            for block in bytes.chunks(BLOCK) {
                file.write_all(block)?;
            }
            Ok(file.sync_all()?)
        })
    }

    /// Reads one of the step's files on each rank.
    fn raw_read(&self, saved: &[PathBuf]) -> Result<f64, Failure> {
        let mut blocks = vec![vec![1; BLOCK]; self.held.len()];
        let is_rank_file = |path: &&PathBuf| path.extension() == Some("safetensors".as_ref());
        let files = saved.iter().filter(is_rank_file);
        timed(files.zip(&mut blocks), |(path, block)| {
            let mut file = File::open(path)?;
            while file.read(block)? > 0 {
                black_box(&mut *block);
            }
            Ok(())
        })
    }

    fn save(&self) -> Result<f64, Failure> {
        let checkpoints = Checkpoints::new(self.dir.join("run"));
        let training = TrainingState {
            step: self.step,
            ..TrainingState::default()
        };
        let request = SaveRequest::new(Arc::clone(&self.plan), training);
        let ends = ThreadRendezvous::new(self.held.len(), Duration::from_secs(300));
        timed(self.held.iter().zip(ends), |(held, mut end)| {
            let mut source = Held { parts: held.iter() };
            save(&checkpoints, &request, &mut source, &mut end)?;
            Ok(())
        })
    }

    fn load(&mut self, verification: Verification) -> Result<f64, Failure> {
        let path = Checkpoints::new(self.dir.join("run")).path(self.step);
        for buffer in self.loaded.iter_mut().flatten() {
            buffer.fill(0);
        }
        let plan = &self.plan;
        let seconds = timed(self.loaded.iter_mut().enumerate(), |(rank, buffers)| {
            let step = Step::open(&path)?.verification(verification);
            for (part, buffer) in plan.of_rank(rank).iter().zip(buffers) {
                step.read_into(&plan.tensors()[part.tensor].name, &part.region, buffer)?;
            }
            Ok(())
        })?;
        if self.loaded == self.held {
            Ok(seconds)
        } else {
            Err("what was loaded is not what was saved".into())
        }
    }
}

/// Returns the seconds until the last rank is done.
fn timed<T: Send>(
    ranks: impl Iterator<Item = T>,
    body: impl Fn(T) -> Result<(), BoxError> + Sync,
) -> Result<f64, Failure> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(move || body(rank))).collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
        Ok::<_, Failure>(())
    })?;
    Ok(start.elapsed().as_secs_f64())
}

fn drop_from_cache(files: &[PathBuf]) -> Result<(), Failure> {
    for file in files {
        File::open(file)?.sync_all()?;
        let mut input = std::ffi::OsString::from("if=");
        input.push(file);
        let dropped = Command::new("dd")
            .arg(input)
            .args(["iflag=nocache", "count=0", "status=none"])
            .status()?;
        if !dropped.success() {
            return Err("dd cannot drop files from the page cache".into());
        }
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        _ if sorted.is_empty() => f64::NAN,
        0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    }
}

impl Options {
    fn read() -> Result<Self, Failure> {
        let mut options = Self {
            ranks: 2,
            rounds: 5,
            params: 50_000_000,
            dir: std::env::temp_dir(),
            json: None,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--ranks" => options.ranks = value()?.parse()?,
                "--rounds" => options.rounds = value()?.parse()?,
                "--params" => options.params = value()?.parse()?,
                "--dir" => options.dir = value()?.into(),
                "--json" => options.json = Some(value()?.into()),
                // Cargo passes this to every benchmark.
                "--bench" => {}
                _ => return Err(format!("there is no {arg}").into()),
            }
        }
        Ok(options)
    }
}
