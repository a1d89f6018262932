//! The `burn-fsdp report` command: the metrics of several runs on one page.

use burn_fsdp_runs::{Run, page};

use crate::args::ReportArgs;
use crate::console;
use crate::error::{Failure, InputError};
use crate::output;

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
