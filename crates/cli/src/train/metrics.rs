//! The metrics of each step, written as soon as the step is complete: as a JSON line, and for TensorBoard.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use burn_fsdp_runs::{EventFile, StepLine};
use serde::Deserialize;

use crate::args::OutputArgs;
use crate::error::InputError;

/// Maximum size of a line in bytes. A longer line is not from this program, and is not read into memory.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// The files that a run is to write its metrics to.
#[derive(Debug)]
pub(crate) struct MetricFiles {
    /// The file of `--metrics`.
    lines: Option<PathBuf>,
    /// The folder of `--tensorboard`.
    events: Option<PathBuf>,
}

impl MetricFiles {
    pub(crate) fn of(args: &OutputArgs) -> Self {
        Self {
            lines: args.metrics.clone(),
            events: args.tensorboard.clone(),
        }
    }
}

/// The open files that receive the metrics, if there are any.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    lines: Option<Lines>,
    events: Option<Events>,
}

/// The file of `--metrics`.
#[derive(Debug)]
struct Lines {
    path: PathBuf,
    file: File,
    /// The end of the last complete line; `None` for a pipe or a terminal.
    end: Option<u64>,
    /// True if the user was warned about lost lines.
    has_failed: bool,
}

/// The event file of `--tensorboard`.
#[derive(Debug)]
struct Events {
    file: EventFile,
    /// True if the user was warned about lost events.
    has_failed: bool,
}

impl Metrics {
    /// Opens the files for a run that starts or resumes at `first_step`.
    pub(crate) fn open(files: &MetricFiles, first_step: usize) -> Result<Self, InputError> {
        let failed = |flag, path: &Path, error: io::Error| InputError::Output {
            flag,
            path: path.to_owned(),
            problem: error.to_string(),
        };
        let lines = files.lines.as_ref().map(|path| {
            let opened = Lines::open(path, first_step);
            opened.map_err(|error| failed("--metrics", path, error))
        });
        let events = files.events.as_ref().map(|folder| {
            let created = EventFile::create(folder, first_step as u64);
            created.map_err(|error| failed("--tensorboard", folder, error))
        });
        Ok(Self {
            lines: lines.transpose()?,
            events: events.transpose()?.map(|file| Events {
                file,
                has_failed: false,
            }),
        })
    }

    /// Returns true if the metrics are written anywhere.
    pub(crate) fn are_written(&self) -> bool {
        self.lines.is_some() || self.events.is_some()
    }

    /// Writes the metrics of a step. The first failure of each file is returned as a warning, and training continues.
    pub(crate) fn write(&mut self, line: &StepLine) -> Vec<String> {
        let lines = self.lines.as_mut().and_then(|lines| lines.write(line));
        let events = self.events.as_mut().and_then(|events| {
            let written = events.file.write(line);
            events.first_failure(written)
        });
        lines.into_iter().chain(events).collect()
    }

    /// Syncs the files to disk, so every saved step has its metrics.
    pub(crate) fn sync(&mut self) -> Vec<String> {
        let lines = self.lines.as_mut().and_then(Lines::sync);
        let events = self.events.as_mut().and_then(|events| {
            let synced = events.file.sync();
            events.first_failure(synced)
        });
        lines.into_iter().chain(events).collect()
    }
}

/// Returns a warning about the first failure of an output, which `has_failed` remembers.
fn first_failure(
    has_failed: &mut bool,
    (flag, path, what): (&str, &Path, &str),
    result: io::Result<()>,
) -> Option<String> {
    let error = result.err()?;
    let is_first = !std::mem::replace(has_failed, true);
    is_first.then(|| {
        let path = path.display();
        format!("{flag} {path}: {error}; {what} are lost, but training continues")
    })
}

impl Events {
    fn first_failure(&mut self, result: io::Result<()>) -> Option<String> {
        let output = ("--tensorboard", self.file.path(), "events");
        first_failure(&mut self.has_failed, output, result)
    }
}

impl Lines {
    /// Starts a new file, or continues the file of a run that is resumed at `first_step`. Lines of earlier steps are
    /// kept. The first later or incomplete line is removed, with all lines after it. A pipe or a terminal only gets new
    /// lines; opening a pipe waits for its reader.
    fn open(path: &Path, first_step: usize) -> io::Result<Self> {
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

    fn write(&mut self, line: &StepLine) -> Option<String> {
        let written = serde_json::to_string(line)
            .map_err(io::Error::from)
            .and_then(|text| self.append(format!("{text}\n").as_bytes()));
        self.first_failure(written)
    }

    fn sync(&mut self) -> Option<String> {
        let synced = match self.end {
            Some(_) => self.file.sync_data(),
            None => Ok(()),
        };
        self.first_failure(synced)
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
        let output = ("--metrics", &*self.path, "lines");
        first_failure(&mut self.has_failed, output, result)
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
        let files = MetricFiles {
            lines: Some(path.clone()),
            events: None,
        };
        let mut metrics = Metrics::open(&files, first_step).expect("opens");
        let line = StepLine {
            step: first_step as u64,
            loss: 1.0,
            tokens_per_s: None,
            step_ms: None,
            lr: None,
            measured: true,
            eval_loss: None,
            grad_norm: None,
            ranks: None,
            flops_per_s: None,
            rss_bytes: None,
            unsharded_bytes: None,
        };
        assert!(metrics.write(&line).is_empty());
        assert!(metrics.sync().is_empty());
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
