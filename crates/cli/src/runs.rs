//! The `burn-fsdp report` command: the metrics of several runs on one page.

use std::path::PathBuf;

use burn_fsdp_runs::{Run, page};
use clap::Args;

use crate::console;
use crate::error::{Failure, InputError};
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ReportArgs {
    /// File that `train --metrics FILE` wrote, or a folder with one such file (*.jsonl)
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// HTML file to write; replaces an existing page
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub(crate) out: PathBuf,
}

const AFTER_HELP: &str = "\
Example:
  burn-fsdp train --metrics a.jsonl && burn-fsdp train --lr 4e-3 --metrics b.jsonl
  burn-fsdp report a.jsonl b.jsonl --out report.html

A run may still be training. The page needs neither scripts nor a network.";

/// Draws the runs, and prints what was drawn.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    const FLAG: &str = "--out";
    output::check_page(FLAG, &args.out, &args.runs)?;
    let runs = args.runs.iter().map(|path| Run::read(path));
    let runs: Vec<Run> = runs.collect::<Result<_, _>>().map_err(InputError::from)?;
    output::write_whole(FLAG, &args.out, page(&runs).as_bytes())?;
    let num_steps: usize = runs.iter().map(|run| run.steps.len()).sum();
    console::answer(format_args!(
        "wrote {}: {} run{} with {num_steps} steps",
        args.out.display(),
        runs.len(),
        if runs.len() == 1 { "" } else { "s" },
    ))
}
