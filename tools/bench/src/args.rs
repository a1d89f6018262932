//! The arguments of a benchmark.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::case::Case;
use crate::encoder::EncoderArgs;

const AFTER_HELP: &str = "\
Examples:
  burn-fsdp-bench --case full-shard --pairs 5
  burn-fsdp-bench --out results.json --svg ratios.svg
  burn-fsdp-bench --no-peers --case encoder

The first run installs PyTorch with pip into the --peers folder (a few GB). With --python, nothing is
installed. Linux only.

Exit code: 0 success; 2 an error in an argument, a program or a file; 3 a rank failed";

/// Measure training against PyTorch, alternating on the same cores
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) program: Option<Program>,
    #[command(flatten)]
    pub(crate) bench: BenchArgs,
}

/// A program of our side that a benchmark starts.
#[derive(Debug, Subcommand)]
pub(crate) enum Program {
    /// Train a model of Burn's own layers on pseudorandom numbers
    #[command(hide = true)]
    EncoderStep(EncoderArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Case to measure; repeat for several [default: all]
    #[arg(long = "case", value_enum, value_name = "CASE")]
    pub(crate) cases: Vec<Case>,
    /// Number of runs of each side per case; the sides take turns running first
    #[arg(long, default_value_t = 20)]
    pub(crate) pairs: usize,
    /// Number of measured steps per run
    #[arg(long, default_value_t = 8)]
    pub(crate) steps: usize,
    /// Number of unmeasured steps before the measured ones
    #[arg(long, default_value_t = 2)]
    pub(crate) warmup: usize,
    /// Folder for PyTorch's programs and their Python [default: burn-fsdp/peers in the user's cache]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) peers: Option<PathBuf>,
    /// Python with torch and numpy to use instead of installing one; not with --no-peers
    #[arg(long, value_name = "PYTHON")]
    pub(crate) python: Option<PathBuf>,
    /// The `burn-fsdp` program to measure [default: the one next to this program]
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) command: Option<PathBuf>,
    /// Measure only burn-fsdp
    #[arg(long, conflicts_with_all = ["peers", "python"])]
    pub(crate) no_peers: bool,
    /// Write every measurement to this file, as JSON, after each pair
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Draw the ratios of all pairs into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object instead of the table, and show no progress
    #[arg(long)]
    pub(crate) json: bool,
}
