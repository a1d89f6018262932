//! TensorBoard event files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::line::StepLine;
use crate::proto;
use crate::record::record;

/// The beginning of the name of every event file.
pub const EVENT_FILE_PREFIX: &str = "events.out.tfevents.";

/// An event file to which a run appends its metrics. TensorBoard can read it at any time.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
    /// The end of the last complete record.
    end: u64,
}

impl EventFile {
    /// Creates an event file in a folder, which is created if it does not exist, for a run that starts at `first_step`.
    ///
    /// Event files of earlier runs in the folder stay unchanged. TensorBoard shows their events only for steps before
    /// `first_step`.
    ///
    /// # Errors
    ///
    /// If the folder or the file cannot be created or written to.
    pub fn create(folder: &Path, first_step: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let now = now();
        // TensorBoard reads files in the order of their names, and an earlier run may have started in this second.
        let mut second = (now as u64).max(newest_in(folder)?.map_or(0, |newest| newest + 1));
        let (path, file) = loop {
            let name = format!("{EVENT_FILE_PREFIX}{second:010}.burn-fsdp");
            let path = folder.join(name);
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => second += 1,
                opened => break (path, opened?),
            }
        };
        let mut events = Self { path, file, end: 0 };
        events.append(&proto::version(now))?;
        events.append(&proto::start(now, first_step))?;
        Ok(events)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the metrics of a step.
    ///
    /// # Errors
    ///
    /// If they cannot be written. The file then ends with the last complete step.
    pub fn write(&mut self, line: &StepLine) -> io::Result<()> {
        self.append(&proto::scalars(now(), line.step, &scalars(line)))
    }

    /// Syncs the file to disk.
    ///
    /// # Errors
    ///
    /// If the operating system reports an error.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn append(&mut self, event: &[u8]) -> io::Result<()> {
        let record = record(event);
        let written = self.file.write_all(&record);
        match written {
            Ok(()) => self.end += record.len() as u64,
            // TensorBoard reads nothing after an incomplete record.
            Err(_) => drop(self.file.set_len(self.end)),
        }
        written
    }
}

/// Returns the values of a step with their tags. TensorBoard groups charts by the part before the slash.
fn scalars(line: &StepLine) -> Vec<(&'static str, f64)> {
    let StepLine {
        step: _,
        loss,
        tokens_per_s,
        step_ms,
        lr,
        measured: _,
        eval_loss,
        grad_norm,
        ranks,
        flops_per_s,
        rss_bytes,
        unsharded_bytes,
    } = line;
    let per_rank = tokens_per_s.zip(*ranks);
    let per_rank = per_rank.filter(|(_, ranks)| *ranks > 0);
    let all = [
        ("loss/train", Some(*loss)),
        ("loss/held_out", *eval_loss),
        ("optimizer/lr", *lr),
        ("optimizer/grad_norm", *grad_norm),
        ("speed/tokens_per_s", *tokens_per_s),
        (
            "speed/tokens_per_s_per_rank",
            per_rank.map(|(tokens, ranks)| tokens / ranks as f64),
        ),
        ("speed/step_ms", *step_ms),
        ("speed/flops_per_s", *flops_per_s),
        ("memory/rss_bytes", rss_bytes.map(|bytes| bytes as f64)),
        (
            "memory/unsharded_bytes",
            unsharded_bytes.map(|bytes| bytes as f64),
        ),
    ];
    let given = all.into_iter();
    given
        .filter_map(|(tag, value)| Some((tag, value?)))
        .collect()
}

/// Returns the time in the name of the folder's newest event file.
fn newest_in(folder: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        let rest = name.strip_prefix(EVENT_FILE_PREFIX);
        let second = rest.and_then(|rest| rest.split('.').next());
        // Names with more digits come from other programs, and cannot be followed by a larger number of ten digits.
        let second = second.and_then(|second| second.parse().ok());
        newest = newest.max(second.filter(|second| *second < 9_999_999_999));
    }
    Ok(newest)
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
