//! The `burn-fsdp` command.
//!
//! - `args`: the command line as it was typed.
//! - `train`: a training run.
//! - `plan`: the cost of a run, without running it.
//! - `steps`: the commands for a saved step.
//! - `bench`: training measured against PyTorch.
//! - `operations`: what the operations of a run carry, written and compared.
//! - `launch`: a command that is run again when it fails. `tether`: how what it runs learns that it is gone.
//! - `text`, `codec`, `weights`, `adapters`, `random`: generated text, text as tokens, weights that each rank reads for itself, and adapters on them, for
//!   several of them.
//! - `limits`: what the machine can do at most.
//! - `bytes`, `host`, `process`, `output`, `console`: sizes, the machine, its processes, files, printing.
//! - `error`: errors, and the exit code for each.

mod adapters;
mod args;
mod bench;
mod bytes;
mod codec;
mod console;
mod error;
mod host;
mod launch;
mod limits;
mod operations;
mod output;
mod plan;
mod process;
mod random;
mod shell;
mod steps;
mod tether;
mod text;
mod train;
mod weights;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};
use crate::error::Failure;
use crate::steps::{consolidate, generate, inspect};
use crate::train::TrainConfig;

/// Counts the bytes of tests of memory.
#[cfg(test)]
#[global_allocator]
static HEAP: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    log_to_stderr();
    take_file_size_limits_as_errors();
    burn_fsdp::allocator::keep_freed_memory();
    tether::watch();
    let result = match command {
        Command::Train(args) => TrainConfig::from_args(*args)
            .map_err(Failure::from)
            .and_then(train::run),
        Command::Consolidate(args) => consolidate::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Plan(args) => plan::run(&args),
        Command::Diff(args) => operations::diff::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Completions(args) => shell::completions(&args),
        Command::Manual(args) => shell::manual(&args),
        Command::EncoderStep(args) => bench::encoder::run(&args),
        Command::Launch(args) => match launch::run(&args) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if failure.is_told_here() {
                console::tell(format_args!("error: {failure}"));
                if let (Failure::Rank(_), Some(machines)) = (&failure, train::machines()) {
                    console::tell(machines);
                }
            }
            train::let_launcher_hear();
            failure.exit_code()
        }
    }
}

/// Makes a limit on the size of files (`ulimit -f`) an error of the write that meets it, like a
/// full disk, and not the end of the process.
fn take_file_size_limits_as_errors() {
    #[cfg(unix)]
    {
        // A signal with a handler does not kill. Where the system refuses one, all is as it was.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    }
}

/// Logs what `RUST_LOG` asks for, and nothing by default: errors end the run with a message of their
/// own, and warnings about sharding are in the report, once for all ranks.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        // It would panic where stderr cannot be written.
        .log_internal_errors(false)
        .init();
}
