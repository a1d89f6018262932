//! The step that a command reads.

use std::path::{Path, PathBuf};

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::Step;

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
    let step = if is_folder {
        folder.newest()
    } else {
        Step::open(PathBuf::from(path))
    };
    step.map_err(|error| InputError::from(error).into())
}
