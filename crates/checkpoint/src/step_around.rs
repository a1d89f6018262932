//! Finds the step that contains a path.

use std::path::{Path, PathBuf};

use crate::index::{INDEX_FILE, SEAL_FILE};
use crate::storage::Storage;

/// Returns the step that is or contains a path, which need not exist. A step is a folder with an index and its seal, or
/// the folder `known`.
pub(crate) fn step_around(
    storage: &dyn Storage,
    path: &Path,
    known: Option<&Path>,
) -> Option<PathBuf> {
    // Missing folders will be created, so only the existing parents can be steps.
    let mut there = path;
    while !storage.exists(there).unwrap_or(false) && there.parent().is_some() {
        there = parent(there);
    }
    if there.as_os_str().is_empty() {
        there = Path::new(".");
    }
    let canonical = |path: &Path| storage.canonical(path).unwrap_or_else(|_| path.to_owned());
    let known = known.map(canonical);
    let is_step = |folder: &&Path| {
        let has = |file| storage.exists(&folder.join(file)).unwrap_or(false);
        known.as_deref() == Some(*folder) || has(INDEX_FILE) && has(SEAL_FILE)
    };
    canonical(there)
        .ancestors()
        .find(is_step)
        .map(Path::to_owned)
}

/// Returns the folder that a file is in.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}
