//! Reads the metrics of a run.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::line::StepLine;

/// Maximum size of a line in bytes. A longer line is not a step, and is not read into memory.
const MAX_LINE_BYTES: u64 = 1 << 16;
/// A file whose first bytes contain no step is not read further, because a device such as `/dev/zero` has no end.
const MAX_BYTES_BEFORE_A_STEP: u64 = 1 << 24;
const EXTENSION: &str = "jsonl";

/// The metrics of a training run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the run, from its path.
    pub name: String,
    /// The path as given.
    pub path: PathBuf,
    /// The steps, in ascending order, each once.
    pub steps: Vec<StepLine>,
    /// How often the run went back to an earlier step. The lines of the steps that it repeated are replaced.
    pub num_restarts: usize,
    /// Number of lines that are not steps: lines of other programs, and a last line that is incomplete.
    pub num_skipped: usize,
}

impl Run {
    /// Reads the metrics file at `path`, or the only metrics file in the folder at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or contains no step, or if the folder does not contain exactly one metrics file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let is_folder = path.is_dir();
        let file = if is_folder {
            metrics_file_in(path)?
        } else {
            path.to_owned()
        };
        let mut run = Self {
            name: name_of(path, is_folder),
            path: path.to_owned(),
            steps: Vec::new(),
            num_restarts: 0,
            num_skipped: 0,
        };
        let opened = File::open(&file).map_err(|source| unreadable(&file, source))?;
        let mut lines = Lines::new(opened);
        let mut num_read = 0;
        while let Some(line) = lines.next().map_err(|source| unreadable(&file, source))? {
            if let Some(step) = step_of(line) {
                num_read += 1;
                run.push(step);
            }
            if run.steps.is_empty() && lines.num_bytes > MAX_BYTES_BEFORE_A_STEP {
                break;
            }
        }
        run.num_skipped = lines.num_lines - num_read;
        if !run.steps.is_empty() {
            Ok(run)
        } else if lines.num_bytes == 0 {
            Err(Error::Empty { path: file })
        } else {
            Err(Error::NotMetrics { path: file })
        }
    }

    /// Adds a step, and removes the steps that it repeats.
    fn push(&mut self, step: StepLine) {
        if self.steps.last().is_some_and(|last| step.step <= last.step) {
            let num_kept = self.steps.partition_point(|kept| kept.step < step.step);
            self.steps.truncate(num_kept);
            self.num_restarts += 1;
        }
        self.steps.push(step);
    }
}

/// Returns the step of a line, or `None` for the line of another program and for an incomplete line.
fn step_of(line: &[u8]) -> Option<StepLine> {
    serde_json::from_slice(line).ok()
}

/// Returns the only file in a folder that contains steps.
fn metrics_file_in(folder: &Path) -> Result<PathBuf, Error> {
    let failed = |source| unreadable(folder, source);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_named = path.extension().is_some_and(|end| end == EXTENSION);
        if is_named
            && path.is_file()
            && has_step(&path).map_err(|source| unreadable(&path, source))?
        {
            found.push(path);
        }
    }
    found.sort();
    match found.len() {
        0 => Err(Error::NoneInFolder {
            path: folder.to_owned(),
        }),
        1 => Ok(found.remove(0)),
        _ => Err(Error::SeveralInFolder {
            path: folder.to_owned(),
            names: found.iter().map(|path| file_name(path)).collect(),
        }),
    }
}

fn has_step(path: &Path) -> io::Result<bool> {
    let mut lines = Lines::new(File::open(path)?);
    while let Some(line) = lines.next()? {
        if step_of(line).is_some() {
            return Ok(true);
        }
        if lines.num_bytes > MAX_BYTES_BEFORE_A_STEP {
            break;
        }
    }
    Ok(false)
}

fn unreadable(path: &Path, source: io::Error) -> Error {
    Error::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Returns the name of a run: its file without the extension, or its folder.
fn name_of(path: &Path, is_folder: bool) -> String {
    // `.` and `..` have names only after links are resolved.
    let real = path.canonicalize();
    let path = match &real {
        Ok(real) if path.file_name().is_none() => real,
        _ => path,
    };
    let name = if is_folder {
        path.file_name()
    } else {
        path.file_stem()
    };
    name.map_or_else(
        || path.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    )
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// The lines of a file.
struct Lines {
    reader: BufReader<File>,
    line: Vec<u8>,
    /// True if the last part did not end its line.
    is_inside: bool,
    num_bytes: u64,
    num_lines: usize,
}

impl Lines {
    fn new(file: File) -> Self {
        Self {
            reader: BufReader::new(file),
            line: Vec::new(),
            is_inside: false,
            num_bytes: 0,
            num_lines: 0,
        }
    }

    /// Returns the next line, or `None` at the end of the file. A line that is too long is returned as several empty
    /// ones, so it need not fit into memory, and its parts are not mistaken for lines.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        let mut part = self.reader.by_ref().take(MAX_LINE_BYTES);
        let length = part.read_until(b'\n', &mut self.line)? as u64;
        if length == 0 {
            return Ok(None);
        }
        let was_inside = self.is_inside;
        self.is_inside = length == MAX_LINE_BYTES && !self.line.ends_with(b"\n");
        if was_inside || self.is_inside {
            self.line.clear();
        }
        self.num_bytes += length;
        self.num_lines += usize::from(!was_inside);
        Ok(Some(self.line.as_slice()))
    }
}
