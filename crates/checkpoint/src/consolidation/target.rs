//! The paths of the output. It is written under a hidden name next to the target, and must be outside all steps.

use std::path::{Path, PathBuf};

use crate::folder_name::{Hidden, nonce, parse_step};
use crate::step_around::{parent, step_around};
use crate::storage::{EntryKind, Storage};
use crate::{Error, Step};

/// Rejects an output that would replace a file of `step`, be inside any step, or have a step's name.
///
/// # Errors
///
/// [`Error::InsideStep`].
pub fn check_outside_steps(step: &Step, out: &Path) -> Result<(), Error> {
    let storage = &**step.storage();
    let refused = |step: &Path| Error::InsideStep {
        out: out.to_owned(),
        step: step.to_owned(),
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    if parse_step(&name).is_some() || Hidden::parse(&name).is_some() {
        return Err(refused(parent(out)));
    }
    match step_around(storage, out, Some(step.path())) {
        Some(step) => Err(refused(&step)),
        None => Ok(()),
    }
}

/// Returns true if the name has no directory part and is not hidden.
pub(super) fn is_plain(name: &str) -> bool {
    let own = Path::new(name).file_name();
    own.is_some_and(|own| own == name) && !name.starts_with('.')
}

/// Removes the files of earlier attempts at the same output. A file that can be locked belongs to a dead process.
pub(super) fn remove_leftovers(storage: &dyn Storage, out: &Path) {
    let folder = match parent(out) {
        folder if folder.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let begin = format!(".{name}.partial-");
    for entry in storage.list(folder).unwrap_or_default() {
        let nonce = entry.name.strip_prefix(&begin);
        let is_ours = nonce.is_some_and(|nonce| {
            nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        if !is_ours || entry.kind != EntryKind::File {
            continue;
        }
        let path = folder.join(&entry.name);
        let lock = storage.lock(&path).ok().flatten();
        if lock.is_some_and(|lock| lock.is_effective()) {
            discard(storage.remove_file(&path), &path);
        }
    }
}

/// Returns an unused hidden name in the folder of the output.
pub(super) fn beside(out: &Path) -> Result<PathBuf, Error> {
    let name = out.file_name().ok_or_else(|| Error::Argument {
        argument: "out",
        expected: "a file or folder name".to_owned(),
        got: out.display().to_string(),
    })?;
    let name = name.to_string_lossy();
    Ok(out.with_file_name(format!(".{name}.partial-{}", nonce())))
}

/// Logs a failure to remove an unfinished output, which only takes space.
pub(super) fn discard(removed: std::io::Result<()>, path: &Path) {
    if let Err(error) = removed {
        tracing::warn!(path = %path.display(), %error, "cannot remove an unfinished file");
    }
}
