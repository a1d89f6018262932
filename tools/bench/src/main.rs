//! Measures training against PyTorch, alternating on the same cores.
//!
//! - `args`: the arguments.
//! - `case`: the training runs, and the commands of both sides.
//! - `peers`: PyTorch's programs, and the Python that runs them.
//! - `program`: one run of a program, and the numbers that it prints.
//! - `pairs`: the runs of a case, alternating between the sides.
//! - `limits`, `origin`: the machine's limits, and the commit and machine of the numbers.
//! - `report`, `picture`: the table, the JSON and the picture.
//! - `encoder`: our program for the cases with Burn's own layers.

mod args;
mod case;
mod encoder;
mod error;
#[path = "../../../crates/cli/src/limits.rs"]
mod limits;
#[path = "../../../benches/origin.rs"]
mod origin;
mod pairs;
mod peers;
mod picture;
mod program;
mod report;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use args::{BenchArgs, Cli, Program};
use case::Case;
use error::Error;
use origin::Run;
use pairs::CaseResult;
use peers::Peers;
use report::Report;

fn main() -> ExitCode {
    let cli = Cli::parse();
    burn_fsdp::allocator::keep_freed_memory();
    let done = match cli.program {
        Some(Program::EncoderStep(args)) => encoder::run(&args),
        None => run(&cli.bench),
    };
    match done.and_then(|text| answer(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, the error cannot be reported.
            let _ = writeln!(io::stderr(), "error: {error}");
            error.exit_code()
        }
    }
}

/// Prints the result. It is not an error if the reader has stopped reading.
fn answer(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Stdout(error)),
        _ => Ok(()),
    }
}

/// Checks that a benchmark can be measured and its results written. Returns our side's command.
fn check(args: &BenchArgs) -> Result<PathBuf, Error> {
    for (flag, value) in [("--pairs", args.pairs), ("--steps", args.steps)] {
        if value == 0 {
            return Err(Error::Zero { flag });
        }
    }
    if let (Some(out), Some(svg)) = (&args.out, &args.svg)
        && out == svg
    {
        return Err(Error::SameFile { path: out.clone() });
    }
    for (flag, path) in [("--out", &args.out), ("--svg", &args.svg)] {
        if let Some(path) = path {
            check_writable(flag, path)?;
        }
    }
    let command = match &args.command {
        Some(command) => command.clone(),
        None => beside_this_program().map_err(|error| Error::CannotRun {
            program: "burn-fsdp".to_owned(),
            problem: error.to_string(),
        })?,
    };
    if command.is_file() {
        Ok(command)
    } else {
        Err(Error::NoCommand { path: command })
    }
}

/// Returns the path at which cargo builds `burn-fsdp`: the folder of this program.
fn beside_this_program() -> io::Result<PathBuf> {
    let name = format!("burn-fsdp{}", std::env::consts::EXE_SUFFIX);
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// Rejects a file that cannot be written, before hours of measurements. Leaves no new file behind.
fn check_writable(flag: &'static str, path: &Path) -> Result<(), Error> {
    let is_new = !path.exists();
    let opened = File::options().append(true).create(true).open(path);
    let checked = opened.and_then(|_| {
        if is_new {
            fs::remove_file(path)
        } else {
            Ok(())
        }
    });
    checked.map_err(|source| Error::Output {
        flag,
        path: path.to_owned(),
        source,
    })
}

/// Measures all cases one after the other, writes the requested files, and returns the text to print.
fn run(args: &BenchArgs) -> Result<String, Error> {
    let command = check(args)?;
    let peers = if args.no_peers {
        None
    } else {
        Some(Peers::prepare(args)?)
    };
    let mut cases = if args.cases.is_empty() {
        Case::all()
    } else {
        args.cases.clone()
    };
    let mut seen = Vec::new();
    cases.retain(|case| !seen.contains(case) && (seen.push(*case), true).1);
    // The commit that was built, even if the working tree changes before the last case ends.
    let run = Run::here("bench");
    // Written after every pair, because a benchmark takes hours. The measurements so far survive an interruption.
    let write = |results: &[CaseResult]| match &args.out {
        Some(path) => {
            let report = Report::new(&run, peers.as_ref(), results.to_vec());
            write_whole("--out", path, &report.to_json())
        }
        None => Ok(()),
    };
    let results = pairs::measure(args, command, peers.as_ref(), &cases, &write)?;
    let report = Report::new(&run, peers.as_ref(), results);
    if let Some(path) = &args.svg {
        write_whole("--svg", path, &picture::draw(&report.cases))?;
    }
    Ok(if args.json {
        report.to_json()
    } else {
        report.to_string()
    })
}

/// Replaces a file atomically, so a reader never sees half of it.
fn write_whole(flag: &'static str, path: &Path, contents: &str) -> Result<(), Error> {
    let part = path.with_extension("part");
    let written = fs::write(&part, contents).and_then(|()| fs::rename(&part, path));
    written.map_err(|source| Error::Output {
        flag,
        path: path.to_owned(),
        source,
    })
}
