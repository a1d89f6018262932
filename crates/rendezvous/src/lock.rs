//! Locks that stay usable after a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the mutex, even if a rank panicked while it held the lock.
///
/// Every critical section of this crate leaves its data consistent at each step. After a panic the other ranks must
/// still be able to read the data to report the panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
