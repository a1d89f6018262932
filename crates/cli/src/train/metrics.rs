//! The metrics file: one JSON line per step, written as soon as the step is complete.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::InputError;

/// Maximum size of a line in bytes. A longer line is not from this program, and is not read into memory.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// The metrics of one step.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct StepLine {
    /// Number of the step, counted from 0, including unmeasured steps.
    pub(crate) step: usize,
    /// Mean loss over the ranks.
    pub(crate) loss: f64,
    /// Tokens per second of all ranks together, by rank 0's clock.
    pub(crate) tokens_per_s: f64,
    pub(crate) step_ms: f64,
    pub(crate) lr: f64,
    /// True if the report's times include the step.
    pub(crate) measured: bool,
    /// Loss on held-out text after this step, if it was evaluated.
    pub(crate) eval_loss: Option<f64>,
}

/// The metrics file, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Option<Open>);

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: File,
    /// The end of the last complete line; `None` for a pipe or a terminal.
    end: Option<u64>,
    /// True if the user was warned about lost lines.
    has_failed: bool,
}

impl Metrics {
    /// Starts a new file, or continues the file of a run that is resumed at `first_step`. Lines of earlier steps are
    /// kept. The first later or incomplete line is removed, with all lines after it. A pipe or a terminal only gets new
    /// lines; opening a pipe waits for its reader.
    pub(crate) fn open(path: Option<&Path>, first_step: usize) -> Result<Self, InputError> {
        let Some(path) = path else {
            return Ok(Self(None));
        };
        let opened = Open::new(path, first_step).map_err(|error| InputError::Output {
            flag: "--metrics",
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
        Ok(Self(Some(opened)))
    }

    /// Writes a line. The first failure is returned as a warning, and training continues.
    pub(crate) fn write(&mut self, line: &StepLine) -> Option<String> {
        let open = self.0.as_mut()?;
        let written = serde_json::to_string(line)
            .map_err(io::Error::from)
            .and_then(|text| open.append(format!("{text}\n").as_bytes()));
        open.first_failure(written)
    }

    /// Syncs the written lines to disk, so every saved step has its metrics. Like [`write`](Self::write), returns the
    /// first failure as a warning.
    pub(crate) fn sync(&mut self) -> Option<String> {
        let open = self.0.as_mut()?;
        let synced = match open.end {
            Some(_) => open.file.sync_data(),
            None => Ok(()),
        };
        open.first_failure(synced)
    }
}

impl Open {
    fn new(path: &Path, first_step: usize) -> io::Result<Self> {
        // Opening must not truncate the file: a run that dies before its first line would lose all older lines.
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).open(path)?;
        let mut end = None;
        if file.metadata()?.is_file() {
            let kept = match first_step {
                0 => 0,
                _ => end_of_lines_before(File::open(path)?, first_step)?,
            };
            file.set_len(kept)?;
            end = Some(kept);
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            end,
            has_failed: false,
        })
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        // One write per line, so a reader never sees half of one.
        let written = self.file.write_all(line);
        if let Some(end) = &mut self.end {
            match written {
                Ok(()) => *end += line.len() as u64,
                // Remove an incomplete line, for example after a full disk, so the next line starts on a new line.
                Err(_) => drop(self.file.set_len(*end)),
            }
        }
        written
    }

    fn first_failure(&mut self, result: io::Result<()>) -> Option<String> {
        let error = result.err()?;
        let is_first = !std::mem::replace(&mut self.has_failed, true);
        is_first.then(|| {
            let path = self.path.display();
            format!("--metrics {path}: {error}; lines are lost, but training continues")
        })
    }
}

/// Returns the offset of the first line that is incomplete or belongs to step `first_step` or a later step. If there is
/// none, returns the end of the file. Lines from other programs are kept.
fn end_of_lines_before(file: File, first_step: usize) -> io::Result<u64> {
    #[derive(Deserialize)]
    struct Numbered {
        step: usize,
    }
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    let mut end = 0;
    loop {
        line.clear();
        let mut length = reader
            .by_ref()
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)? as u64;
        let is_whole = line.ends_with(b"\n");
        let is_later = || {
            let line = serde_json::from_slice::<Numbered>(&line);
            line.is_ok_and(|line| line.step >= first_step)
        };
        if !is_whole && length == MAX_LINE_BYTES {
            length += skip_line(&mut reader)?;
        } else if !is_whole || is_later() {
            return Ok(end);
        }
        end += length;
    }
}

/// Skips to the end of a line, with little memory, and returns the number of bytes.
fn skip_line(reader: &mut impl BufRead) -> io::Result<u64> {
    let mut skipped = 0;
    loop {
        let available = reader.fill_buf()?;
        let end = available.iter().position(|&byte| byte == b'\n');
        let length = end.map_or(available.len(), |end| end + 1);
        let is_done = end.is_some() || available.is_empty();
        reader.consume(length);
        skipped += length as u64;
        if is_done {
            return Ok(skipped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str, first_step: usize) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics");
        std::fs::write(&path, text).expect("writes");
        let mut metrics = Metrics::open(Some(&path), first_step).expect("opens");
        let line = StepLine {
            step: first_step,
            loss: 1.0,
            tokens_per_s: 1.0,
            step_ms: 1.0,
            lr: 1.0,
            measured: true,
            eval_loss: None,
        };
        assert_eq!(metrics.write(&line), None);
        assert_eq!(metrics.sync(), None);
        let whole = std::fs::read_to_string(&path).expect("reads");
        let (kept, new) = whole
            .trim_end()
            .rsplit_once('\n')
            .unwrap_or(("", whole.trim_end()));
        assert!(
            new.starts_with(&format!("{{\"step\":{first_step},")),
            "{whole}"
        );
        kept.to_owned()
    }

    #[test]
    fn whole_lines_of_earlier_steps_stay() {
        let lines = "{\"step\":0}\n{\"step\":1}\nnot ours\n{\"step\":2}\n{\"step\":3";
        assert_eq!(kept(lines, 2), "{\"step\":0}\n{\"step\":1}\nnot ours");
        assert_eq!(
            kept(lines, 3),
            "{\"step\":0}\n{\"step\":1}\nnot ours\n{\"step\":2}"
        );
        assert_eq!(kept(lines, 0), "");
        assert_eq!(kept("", 7), "");
        let long = format!("{}\n{{\"step\":1}}\n{{\"step\":2}}\n", "x".repeat(200_000));
        assert_eq!(
            kept(&long, 2),
            format!("{}\n{{\"step\":1}}", "x".repeat(200_000))
        );
    }
}
