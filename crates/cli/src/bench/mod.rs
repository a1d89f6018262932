//! Training measured against PyTorch, both in turn on the same cores.
//!
//! - `case`: what is trained, and by which commands.
//! - `peers`: PyTorch's programs, and the Python that runs them.
//! - `program`: one run of a program, and what it says of itself.
//! - `pairs`: the runs of a case, ours and the peer's in turn.
//! - `limits`, `origin`: what the machine can do at most, and of what commit and machine numbers are.
//! - `report`, `picture`: what comes out.
//! - `encoder`: our program of the cases of Burn's own layers.

mod case;
pub(crate) mod encoder;
mod limits;
mod origin;
mod pairs;
mod peers;
mod picture;
mod program;
mod report;

use std::path::PathBuf;

use clap::Args;

pub(crate) use case::Case;

use crate::error::{Failure, InputError};
use crate::{console, output};
use peers::Peers;
use report::Report;

const AFTER_HELP: &str = "\
Examples:
  burn-fsdp bench --case full-shard --pairs 5
  burn-fsdp bench --out results.json --svg ratios.svg
  burn-fsdp bench --no-peers --case encoder

PyTorch comes by pip, once, into the folder of --peers (700 MB); with --python nothing is installed.

Exit code: see `burn-fsdp --help`";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// What to measure; give it several times for several [default: all]
    #[arg(long = "case", value_enum, value_name = "CASE")]
    pub(crate) cases: Vec<Case>,
    /// Runs of each side of a case; which side goes first alternates
    #[arg(long, default_value_t = 20)]
    pub(crate) pairs: usize,
    /// Measured steps of a run
    #[arg(long, default_value_t = 8)]
    pub(crate) steps: usize,
    /// Unmeasured steps before them
    #[arg(long, default_value_t = 2)]
    pub(crate) warmup: usize,
    /// Folder of PyTorch's programs and of the Python that runs them [default: burn-fsdp/peers in the user's cache]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) peers: Option<PathBuf>,
    /// Python with torch and numpy to run them with, in place of one that is installed for it
    #[arg(long, value_name = "PYTHON")]
    pub(crate) python: Option<PathBuf>,
    /// Measure our side alone
    #[arg(long, conflicts_with_all = ["peers", "python"])]
    pub(crate) no_peers: bool,
    /// Write every measurement to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Draw the ratios of all pairs into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object instead of the table, and show no progress
    #[arg(long)]
    pub(crate) json: bool,
}

impl BenchArgs {
    fn check(&self) -> Result<(), InputError> {
        for (flag, value) in [("--pairs", self.pairs), ("--steps", self.steps)] {
            if value == 0 {
                return Err(InputError::Zero { flag });
            }
        }
        for (flag, path) in [("--out", &self.out), ("--svg", &self.svg)] {
            if let Some(path) = path {
                output::check_one(flag, path)?;
            }
        }
        match (&self.out, &self.svg) {
            (Some(out), Some(svg)) if out == svg => Err(InputError::SameFile {
                first: "--out",
                second: "--svg",
                path: out.clone(),
            }),
            _ => Ok(()),
        }
    }
}

/// Measures all cases, one after the other, and prints and writes what was seen.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    args.check()?;
    let peers = match args.no_peers {
        true => None,
        false => Some(Peers::prepare(args)?),
    };
    let mut cases = match args.cases.is_empty() {
        true => Case::all(),
        false => args.cases.clone(),
    };
    let mut seen = Vec::new();
    cases.retain(|case| !seen.contains(case) && (seen.push(*case), true).1);
    let results = pairs::measure(args, peers.as_ref(), &cases)?;
    let report = Report::new(peers.as_ref(), results);
    if let Some(path) = &args.out {
        output::write_whole("--out", path, report.to_json().as_bytes())?;
    }
    if let Some(path) = &args.svg {
        output::write_whole("--svg", path, picture::draw(&report.cases).as_bytes())?;
    }
    console::answer(match args.json {
        true => report.to_json(),
        false => report.to_string(),
    })
}
