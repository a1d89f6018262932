//! The `burn-fsdp diff` command: the first operation in which two runs differ.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::de::DeserializeOwned;

use super::line::{Header, Line, file_name};
use crate::console;
use crate::error::{Failure, InputError};

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DiffArgs {
    /// Folder that `train --operations FOLDER` wrote
    pub(crate) run_a: PathBuf,
    /// Another such folder, with the same number of ranks
    pub(crate) run_b: PathBuf,
}

const AFTER_HELP: &str = "\
Example:
  burn-fsdp train --operations a && burn-fsdp train --operations b && burn-fsdp diff a b

Exit code: 0 if all operations carry the same bytes on all ranks, 3 if not";

/// The operations of a run, by rank, in the order in which they finished.
type Run = Vec<Vec<Line>>;

/// How two runs differ in an operation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    /// Only one run has this operation. The other has this different one in its place, or none.
    OtherCall(Option<String>),
    /// The rank sent different bytes for the tensor with this index.
    Gave(usize),
    /// The rank received different bytes for the tensor with this index, although it sent the same bytes.
    Got(usize),
}

/// The first difference on a rank.
#[derive(Debug)]
struct Difference {
    how: How,
    /// The operation's index in the rank's operations.
    index: usize,
    line: Line,
}

/// Compares two runs, and prints a line if they carry the same bytes. Returns the first difference as an error.
pub(crate) fn run(args: &DiffArgs) -> Result<(), Failure> {
    let [a, b] = [&args.run_a, &args.run_b].map(|folder| read(folder));
    let (a, b) = (a?, b?);
    if a.len() != b.len() {
        let problem = format!(
            "one run has {} ranks, but the other has {}",
            a.len(),
            b.len()
        );
        return Err(unreadable(&args.run_b, problem).into());
    }
    let ranks = a.iter().zip(&b).enumerate();
    let firsts = ranks.filter_map(|(rank, (a, b))| Some((rank, first(a, b)?)));
    // The earliest step is reported. Within a step, a rank that sends other bytes comes before the ranks that receive
    // them.
    let key = |(rank, found): &(usize, Difference)| {
        (found.line.step, found.how.clone(), found.index, *rank)
    };
    match firsts.min_by_key(key) {
        None => {
            let operations: usize = a.iter().map(Vec::len).sum();
            let ranks = a.len();
            console::answer(format_args!(
                "the runs have the same bytes: {operations} operations of {ranks} ranks"
            ))
        }
        Some((rank, found)) => Err(Failure::Unfinished(format!(
            "the runs differ first {found}, on rank {rank}"
        ))),
    }
}

/// Returns the first operation in which a rank's two records differ. A group's operations are compared by their number,
/// because operations of different groups may finish in a different order.
fn first(a: &[Line], b: &[Line]) -> Option<Difference> {
    let key = |line: &Line| (line.group.clone(), line.sequence);
    let mut others: HashMap<_, Vec<&Line>> = HashMap::new();
    // Successive groups may have the same name. The order is reversed, so `pop` returns the earliest.
    b.iter()
        .rev()
        .for_each(|line| others.entry(key(line)).or_default().push(line));
    let differs = |(index, line): (usize, &Line)| {
        let other = others.get_mut(&key(line)).and_then(Vec::pop);
        let how = difference(line, other)?;
        Some(Difference {
            how,
            index,
            line: line.clone(),
        })
    };
    let found = a.iter().enumerate().find_map(differs);
    // The second run has an additional operation.
    let beyond = || {
        let line = b.get(a.len())?;
        Some(Difference {
            how: How::OtherCall(None),
            index: a.len(),
            line: line.clone(),
        })
    };
    found.or_else(beyond)
}

fn difference(line: &Line, other: Option<&Line>) -> Option<How> {
    let Some(other) = other else {
        return Some(How::OtherCall(None));
    };
    let is_same_call = (&line.kind, &line.label) == (&other.kind, &other.label)
        && line.given.len() == other.given.len()
        && line.got.len() == other.got.len();
    if !is_same_call {
        let call = format!("{} {:?}", other.kind, other.label);
        return Some(How::OtherCall(Some(call)));
    }
    let position = |a: &[u64], b: &[u64]| a.iter().zip(b).position(|(a, b)| a != b);
    // The sent bytes have an entry for each rank and part.
    let parts = line.got.len().max(1);
    let gave = position(&line.given, &other.given).map(|index| How::Gave(index % parts));
    gave.or_else(|| position(&line.got, &other.got).map(How::Got))
}

fn read(folder: &Path) -> Result<Run, InputError> {
    if !folder.join(file_name(0)).exists() {
        let problem = format!("it contains no {}", file_name(0));
        return Err(unreadable(folder, problem));
    }
    let (ranks, first) = read_rank(folder, 0)?;
    let others = (1..ranks).map(|rank| {
        let (of, lines) = read_rank(folder, rank)?;
        if of == ranks {
            Ok(lines)
        } else {
            let problem = format!(
                "it is from a run of {of} ranks, but the file of rank 0 is from a run of \
                     {ranks}"
            );
            Err(unreadable(&folder.join(file_name(rank)), problem))
        }
    });
    std::iter::once(Ok(first)).chain(others).collect()
}

/// Reads a rank's file: the number of ranks in its header, and its operations.
fn read_rank(folder: &Path, rank: usize) -> Result<(usize, Vec<Line>), InputError> {
    let path = folder.join(file_name(rank));
    let text = fs::read_to_string(&path).map_err(|error| unreadable(&path, error))?;
    let mut lines = text.lines().zip(1_usize..);
    let Some((first, _)) = lines.next() else {
        return Err(unreadable(&path, "it is empty"));
    };
    let header: Header = parsed(&path, (first, 1))?;
    if header.rank != rank || header.ranks <= rank {
        let Header { rank, ranks } = header;
        return Err(unreadable(
            &path,
            format!("its header specifies rank {rank} of {ranks}"),
        ));
    }
    let lines = lines.map(|line| parsed(&path, line));
    Ok((header.ranks, lines.collect::<Result<_, _>>()?))
}

/// Parses line `number` of the file.
fn parsed<T: DeserializeOwned>(
    path: &Path,
    (line, number): (&str, usize),
) -> Result<T, InputError> {
    // The parser sees only one line, so its own line number is useless.
    let problem = |error: serde_json::Error| {
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        unreadable(path, format!("line {number}: {text}"))
    };
    serde_json::from_str(line).map_err(problem)
}

fn unreadable(path: &Path, problem: impl fmt::Display) -> InputError {
    InputError::Operations {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line {
            step,
            group,
            sequence,
            kind,
            label,
            ..
        } = &self.line;
        match step {
            Some(step) => write!(f, "in step {step}")?,
            None => f.write_str("before the first step")?,
        }
        write!(
            f,
            ", {kind} {label:?} (operation {sequence} of group {group:?}): "
        )?;
        match &self.how {
            How::OtherCall(None) => f.write_str("only one run does it"),
            How::OtherCall(Some(call)) => write!(f, "the second run does {call} instead"),
            How::Gave(part) => write!(f, "the rank sends different bytes of tensor {part}"),
            How::Got(part) => write!(
                f,
                "the rank sends the same bytes, but receives different bytes of tensor {part}"
            ),
        }
    }
}
