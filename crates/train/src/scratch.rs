//! Files of whole tensors that are in transit between the ranks and Burn's checkpointers.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::Bytes;
use tempfile::TempDir;

use burn_fsdp_glue::error::Error;

/// The largest file that Burn's record readers accept.
const MAX_FILE_BYTES: u64 = 100 << 30;
/// The largest tensor in a file that Burn's record readers accept.
const MAX_TENSOR_BYTES: u64 = 10 << 30;

/// A temporary folder, removed on drop.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: TempDir,
    /// Held while the folder is in use, so the folders of killed processes can be recognized.
    _lock: Option<File>,
}

/// Name of the lock file in a folder.
const LOCK: &str = "lock";

/// Prefix of the folders' names.
const PREFIX: &str = "burn-fsdp-";

/// Minimum age at which a free lock counts as left behind; a younger one may be about to be taken.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

impl Scratch {
    /// Creates a folder in `parent`, or by default in the usual folder for large temporary files.
    pub(crate) fn new(parent: Option<&Path>) -> Result<Self, Error> {
        let parent = match parent {
            Some(parent) => parent.to_owned(),
            None => usual(),
        };
        let made = std::fs::create_dir_all(&parent);
        let made = made.and_then(|()| tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent));
        let folder = made.map_err(failure("create a folder in", &parent))?;
        let lock = File::create(folder.path().join(LOCK)).ok();
        let lock = lock.filter(|lock| lock.try_lock().is_ok());
        remove_left_behind(&parent);
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a file in the folder.
    pub(crate) fn pile(&self, name: &str) -> Result<Pile, Error> {
        let path = self.path(name);
        let file = File::create(&path).map_err(failure("create", &path))?;
        Ok(Pile {
            path,
            file,
            num_bytes: 0,
        })
    }
}

/// Removes the folders of killed processes, whose locks are not held.
fn remove_left_behind(parent: &Path) {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join(LOCK)) else {
            continue;
        };
        let made = lock.metadata().and_then(|lock| lock.modified());
        let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > LEFT_BEHIND));
        if is_old && lock.try_lock().is_ok() {
            // A folder that cannot be removed only wastes disk space.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the folder for large temporary files: the one that the user configured, or one that is not in memory.
fn usual() -> PathBuf {
    let on_disk = Path::new("/var/tmp");
    let can_be_written = || tempfile::tempfile_in(on_disk).is_ok();
    match std::env::var_os("TMPDIR") {
        None if can_be_written() => on_disk.to_owned(),
        _ => std::env::temp_dir(),
    }
}

/// A file to which tensors are added, one after another.
#[derive(Debug)]
pub(crate) struct Pile {
    path: PathBuf,
    file: File,
    num_bytes: u64,
}

impl Pile {
    /// Appends a tensor's bytes to the file, and returns them as a lazily read part of it.
    ///
    /// # Errors
    ///
    /// [`Error::Scratch`] if writing fails, or for a tensor that Burn's record readers would reject.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<Bytes, Error> {
        let (start, size) = (self.num_bytes, bytes.len() as u64);
        if size > MAX_TENSOR_BYTES || start.saturating_add(size) > MAX_FILE_BYTES {
            let problem = "Burn reads no record of more than 100 GiB, and no tensor of more than 10 GiB; write your \
                 own loop, and save with `burn_fsdp::save`, which divides the files among the ranks";
            return Err(failure("write", &self.path)(io::Error::other(problem)));
        }
        let written = self.file.write_all(bytes);
        written.map_err(failure("write", &self.path))?;
        self.num_bytes = start + size;
        Ok(Bytes::from_file(&self.path, size, start))
    }
}

/// Returns a function that turns a failed operation on a file into an error.
pub(crate) fn failure(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Scratch {
        operation,
        path,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_holds_its_data_until_dropped() {
        let parent = tempfile::tempdir().expect("a folder");
        let scratch = Scratch::new(Some(&parent.path().join("deep"))).expect("it is made");
        let mut pile = scratch.pile("tensors").expect("it begins");
        let first = pile.add(&[1, 2, 3]).expect("it is written");
        let second = pile.add(&[4, 5]).expect("it is written");
        assert_eq!((&second[..], &first[..]), (&[4, 5][..], &[1, 2, 3][..]));
        let path = scratch.path("tensors");
        assert!(path.exists());
        drop(scratch);
        assert!(!path.exists());
        // A killed process leaves a folder with a lock that is not held; a folder whose lock is young or held
        // stays.
        let left = |name: &str, age| {
            let folder = parent.path().join(format!("{PREFIX}{name}"));
            std::fs::create_dir(&folder).expect("it is made");
            let lock = File::create(folder.join(LOCK)).expect("it is made");
            let time = std::time::SystemTime::now() - age;
            lock.set_modified(time).expect("it has a time");
            (folder, lock)
        };
        let (dead, free) = left("dead", 2 * LEFT_BEHIND);
        drop(free);
        let (alive, held) = left("alive", 2 * LEFT_BEHIND);
        held.try_lock().expect("it is free");
        let (young, _) = left("young", Duration::ZERO);
        drop(Scratch::new(Some(parent.path())).expect("it is made"));
        assert_eq!(
            [&dead, &alive, &young].map(|it| it.exists()),
            [false, true, true]
        );
        drop(held);
        let file = parent.path().join("file");
        std::fs::write(&file, "").expect("it is written");
        let error = Scratch::new(Some(&file))
            .expect_err("it is no folder")
            .to_string();
        assert!(
            error.contains("file") && error.contains("scratch"),
            "{error}"
        );
    }
}
