//! The locks of a folder of steps, for one save or for a whole run.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Error;
use crate::storage::{Lock, Storage};

/// Name of the locked file.
const LOCK_FILE: &str = ".lock";

/// Time to wait for a lock before reporting that somebody else holds it. A process that was just killed, or another
/// program's save, has usually ended by then.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two attempts to take the lock.
const RETRY: Duration = Duration::from_millis(20);

/// The right to change a folder during one save or removal.
#[derive(Debug)]
pub(crate) enum FolderLock {
    /// A lock that excludes everybody else.
    Own(#[expect(dead_code, reason = "held for its lock")] Box<dyn Lock>),
    /// A turn that excludes other saves of the same run, whose [`RunLock`] excludes everybody else.
    Turn(Arc<RunLock>),
}

/// A lock on a folder for the life of a run.
#[derive(Debug)]
pub(crate) struct RunLock {
    lock: Box<dyn Lock>,
    /// True while a save or removal of this run is in progress.
    is_busy: AtomicBool,
}

impl FolderLock {
    pub(crate) fn new(storage: &dyn Storage, root: &Path) -> Result<Self, Error> {
        Ok(Self::Own(lock(storage, root)?))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let Self::Turn(held) = self {
            held.is_busy.store(false, Ordering::Release);
        }
    }
}

impl RunLock {
    pub(crate) fn new(storage: &dyn Storage, root: &Path) -> Result<Self, Error> {
        Ok(Self {
            lock: lock(storage, root)?,
            is_busy: AtomicBool::new(false),
        })
    }

    pub(crate) fn is_effective(&self) -> bool {
        self.lock.is_effective()
    }

    /// Waits for the run's other save or removal, for at most [`PATIENCE`], and takes the turn.
    pub(crate) fn turn(held: &Arc<Self>, root: &Path) -> Result<FolderLock, Error> {
        wait(root, || {
            let was_busy = held.is_busy.swap(true, Ordering::AcqRel);
            Ok((!was_busy).then(|| FolderLock::Turn(Arc::clone(held))))
        })
    }
}

fn lock(storage: &dyn Storage, root: &Path) -> Result<Box<dyn Lock>, Error> {
    let path = root.join(LOCK_FILE);
    wait(root, || {
        storage.lock(&path).map_err(Error::io("lock", &path))
    })
}

/// Repeats an attempt until it succeeds or [`PATIENCE`] has passed.
fn wait<T>(root: &Path, attempt: impl Fn() -> Result<Option<T>, Error>) -> Result<T, Error> {
    let start = Instant::now();
    loop {
        match attempt()? {
            Some(lock) => return Ok(lock),
            None if start.elapsed() < PATIENCE => sleep(RETRY),
            None => {
                let path = root.join(LOCK_FILE);
                return Err(Error::Locked { path });
            }
        }
    }
}
