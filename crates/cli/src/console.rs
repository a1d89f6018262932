//! Printing to stdout and stderr. A closed reader does not cause a panic, and does not end a training run.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use crate::error::Failure;

/// Prints a line on stderr. Errors are ignored, because there is no place to report them.
pub(crate) fn tell(line: impl Display) {
    // One write, because other processes may write to the same terminal.
    let line = format!("{line}\n");
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Prints the result of the command on stdout.
///
/// A reader that stopped reading is not an error. Any other error means that a requested result was lost.
pub(crate) fn answer(text: impl Display) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Stdout(error)),
        _ => Ok(()),
    }
}
