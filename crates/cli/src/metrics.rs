//! The file of metrics: one JSON line per step, there as soon as the step is done.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::RankError;

/// One step.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct StepLine {
    /// From 0 on, unmeasured steps included.
    pub(crate) step: usize,
    /// Mean over the ranks.
    pub(crate) loss: f64,
    /// Of all ranks together, by rank 0's clock.
    pub(crate) tokens_per_s: f64,
    pub(crate) step_ms: f64,
    pub(crate) lr: f64,
    /// Whether the step counts for the report's times.
    pub(crate) measured: bool,
    /// Loss on held-out text after this step, where it was evaluated.
    pub(crate) eval_loss: Option<f64>,
}

/// Where the lines go, if anywhere.
#[derive(Debug)]
pub(crate) struct Metrics(Option<(PathBuf, File)>);

impl Metrics {
    pub(crate) fn create(path: Option<&Path>) -> Result<Self, RankError> {
        let create = |path: &Path| match File::create(path) {
            Ok(file) => Ok((path.to_owned(), file)),
            Err(source) => Err(failed(path, source)),
        };
        Ok(Self(path.map(create).transpose()?))
    }

    /// Goes on with the file of a run that is resumed at `step`: its lines before that stay, what comes
    /// after and what is torn goes. Without a file, one is begun.
    pub(crate) fn resume(path: Option<&Path>, step: usize) -> Result<Self, RankError> {
        let Some(path) = path else {
            return Ok(Self(None));
        };
        let old = match fs::read(path) {
            Ok(old) => old,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(path, error)),
        };
        let mut file = File::create(path).map_err(|error| failed(path, error))?;
        let lines = old.split_inclusive(|&byte| byte == b'\n');
        let kept: Vec<u8> = lines
            .filter(|line| is_before(line, step))
            .flatten()
            .copied()
            .collect();
        file.write_all(&kept).map_err(|error| failed(path, error))?;
        Ok(Self(Some((path.to_owned(), file))))
    }

    pub(crate) fn write(&mut self, line: &StepLine) -> Result<(), RankError> {
        let Some((path, file)) = &mut self.0 else {
            return Ok(());
        };
        // One write a line: a reader never sees half of one.
        let written = serde_json::to_string(line)
            .map_err(io::Error::from)
            .and_then(|text| file.write_all(format!("{text}\n").as_bytes()));
        written.map_err(|source| failed(path, source))
    }
}

/// Whether a line is whole and of a step before `step`.
fn is_before(line: &[u8], step: usize) -> bool {
    #[derive(Deserialize)]
    struct Numbered {
        step: usize,
    }
    line.ends_with(b"\n")
        && serde_json::from_slice::<Numbered>(line).is_ok_and(|line| line.step < step)
}

fn failed(path: &Path, source: io::Error) -> RankError {
    RankError::Metrics {
        path: path.to_owned(),
        source,
    }
}
