//! The command that draws runs.

use std::path::PathBuf;

use clap::Args;

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
