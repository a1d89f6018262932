//! Training measured against PyTorch, both in turn on the same cores.
//!
//! - `args`: the arguments.
//! - `case`: what is trained, and by which commands.
//! - `peers`: PyTorch's programs, and the Python that runs them.
//! - `program`: one run of a program, and what it says of itself.
//! - `pairs`: the runs of a case, ours and the peer's in turn.
//! - `origin`: of what commit and machine numbers are.
//! - `report`, `picture`: what comes out.
//! - `encoder`: our program of the cases of Burn's own layers.

pub(crate) mod args;
mod case;
pub(crate) mod encoder;
mod origin;
mod pairs;
mod peers;
mod picture;
mod program;
mod report;

use crate::error::{Failure, InputError};
use crate::{console, output};
use args::BenchArgs;
use case::Case;
use origin::Run;
use pairs::CaseResult;
use peers::Peers;
use report::Report;

/// Refuses what could not be measured or written.
fn check(args: &BenchArgs) -> Result<(), InputError> {
    for (flag, value) in [("--pairs", args.pairs), ("--steps", args.steps)] {
        if value == 0 {
            return Err(InputError::Zero { flag });
        }
    }
    for (flag, path) in [("--out", &args.out), ("--svg", &args.svg)] {
        if let Some(path) = path {
            output::check_one(flag, path)?;
        }
    }
    match (&args.out, &args.svg) {
        (Some(out), Some(svg)) if out == svg => Err(InputError::SameFile {
            first: "--out",
            second: "--svg",
            path: out.clone(),
        }),
        _ => Ok(()),
    }
}

/// Measures all cases, one after the other, and prints and writes what was seen.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    check(args)?;
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
    // What was built, and not what the working tree has become until the last case ends.
    let run = Run::here("bench");
    // Written after every pair: a benchmark takes hours, and what stops it leaves what it has measured.
    let write = |results: &[CaseResult]| match &args.out {
        Some(path) => {
            let report = Report::new(&run, peers.as_ref(), results.to_vec());
            Ok(output::write_whole(
                "--out",
                path,
                report.to_json().as_bytes(),
            )?)
        }
        None => Ok(()),
    };
    let results = pairs::measure(args, peers.as_ref(), &cases, &write)?;
    let report = Report::new(&run, peers.as_ref(), results);
    if let Some(path) = &args.svg {
        output::write_whole("--svg", path, picture::draw(&report.cases).as_bytes())?;
    }
    console::answer(match args.json {
        true => report.to_json(),
        false => report.to_string(),
    })
}
