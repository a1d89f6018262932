//! Locks of what threads of one training share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock whatever happened to the thread that had it.
pub(crate) fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
