//! The step that a command reads.

use std::path::{Path, PathBuf};

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::{Error, Step};

use crate::error::{Failure, InputError};

/// Maximum number of attempts to read the newest step if it is removed during reading.
const ATTEMPTS: usize = 5;

/// Reads the step at `path`, or the newest step if it is a checkpoint folder. If a training run removes that step
/// during reading, starts again with the newest step.
pub(crate) fn with_step<T>(
    path: &Path,
    mut read: impl FnMut(Step) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut attempt = 1;
    loop {
        let folder = Checkpoints::new(path);
        let is_folder = folder.is_begun().unwrap_or(false);
        let mut opened = path.to_owned();
        let result = open(&folder, is_folder, path).and_then(|step| {
            opened = step.path().to_owned();
            // If the step cannot be held, reading it reports the error.
            let _ = step.hold();
            read(step)
        });
        let is_gone = is_folder && (opened == path || !opened.exists());
        if result.is_ok() || !is_gone || attempt == ATTEMPTS {
            return result;
        }
        attempt += 1;
    }
}

fn open(folder: &Checkpoints, is_folder: bool, path: &Path) -> Result<Step, Failure> {
    if is_folder {
        return folder
            .newest()
            .map_err(|error| InputError::from(error).into());
    }
    Step::open(PathBuf::from(path)).map_err(|error| {
        let of_other_format = match &error {
            Error::NotACheckpoint { .. } => of_other_format(path),
            _ => None,
        };
        of_other_format.unwrap_or_else(|| error.into()).into()
    })
}

/// Returns the error for a folder of `transformers` or of peft, which is not a checkpoint.
fn of_other_format(path: &Path) -> Option<InputError> {
    let (format, remedy) = if path.join("adapter_config.json").is_file() {
        (
            "adapters in peft's format",
            "`burn-fsdp consolidate` with --merge and --init merges them into their model",
        )
    } else if path.join("config.json").is_file() {
        (
            "a model in Hugging Face's format",
            "`burn-fsdp generate` and `burn-fsdp train` read it with --init",
        )
    } else {
        return None;
    };
    let path = path.to_owned();
    Some(InputError::NotACheckpoint {
        path,
        format,
        remedy,
    })
}
