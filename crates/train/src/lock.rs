//! Locks for data that threads of one training run share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock even if a thread that held it has panicked.
pub(crate) fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
