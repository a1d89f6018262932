//! The `burn-fsdp` command.
//!
//! - `args`: the command-line arguments. `config_file`: arguments of `train` from a file. `shell`: completions and
//!   manual pages.
//! - `train`: a training run.
//! - `plan`: the cost of a run, without running it.
//! - `steps`: the commands for a saved step.
//! - `runs`: the page of the metrics of several runs.
//! - `operations`: records of a run's operations, and their comparison.
//! - `launch`: restarts a failed command. `tether`: notifies the processes below `launch` of its end.
//! - `text` generates text, `codec` converts text to tokens, `weights` reads weights shard by shard, `adapters`
//!   describes adapters on these weights, and `random` draws random numbers. Several commands share them.
//! - `limits`: the machine's limits.
//! - `bytes`, `host`, `process`, `output`, `console`: sizes, the machine, its processes, files, printing.
//! - `error`: errors, and their exit codes.

mod adapters;
mod args;
mod bytes;
mod choice;
mod codec;
mod config_file;
mod console;
mod enough;
mod error;
mod host;
mod launch;
mod limits;
mod operations;
mod output;
mod plan;
mod process;
mod random;
mod runs;
mod shell;
mod steps;
mod tether;
mod text;
mod train;
mod weights;

use std::env;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use tracing_subscriber::EnvFilter;

use burn_fsdp::internals::collectives::processes;

use crate::args::{Cli, Command};
use crate::error::Failure;
use crate::steps::{consolidate, generate, inspect};
use crate::train::TrainConfig;

/// Counts heap bytes for memory tests.
#[cfg(test)]
#[global_allocator]
static HEAP: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> ExitCode {
    let line = config_file::with_flags_of_file(env::args_os().collect());
    let matches = match &line {
        Ok(line) => Cli::command().get_matches_from(line),
        Err(error) => {
            console::tell(format_args!("error: {error}"));
            return ExitCode::from(2);
        }
    };
    let Cli { command } = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    log_to_stderr();
    take_file_size_limits_as_errors();
    burn_fsdp::allocator::keep_freed_memory();
    tether::watch();
    let result = match command {
        Command::Train(args) if args.print_config => print_config(&matches),
        Command::Train(args) => TrainConfig::from_args(*args)
            .map_err(Failure::from)
            .and_then(train::run),
        Command::Consolidate(args) => consolidate::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Plan(args) => plan::run(&args),
        Command::Report(args) => runs::run(&args),
        Command::Diff(args) => operations::diff::run(&args),
        Command::Completions(args) => shell::completions(&args),
        Command::Manual(args) => shell::manual(&args),
        Command::Launch(args) => match launch::run(&args, config_file::resumes) {
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

/// Prints the flags of `train`, once for all processes of a launcher.
fn print_config(matches: &ArgMatches) -> Result<(), Failure> {
    let is_first = processes().ok().flatten().is_none_or(|own| own.rank == 0);
    match matches.subcommand() {
        Some((_, train)) if is_first => console::answer(config_file::as_file(train)),
        _ => Ok(()),
    }
}

/// Turns a file size limit (`ulimit -f`) into an error of the write that exceeds it, like a full disk. By default,
/// exceeding it ends the process.
fn take_file_size_limits_as_errors() {
    #[cfg(unix)]
    {
        // A signal with a handler does not kill the process. If the system refuses the handler, nothing changes.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    }
}

/// Logs what `RUST_LOG` requests, and nothing by default: an error that ends the run is printed without a log, and the
/// report lists the warnings about sharding, once for all ranks.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        // Otherwise, a failed write to stderr would cause a panic.
        .log_internal_errors(false)
        .init();
}
