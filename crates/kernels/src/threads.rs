//! Who computes.

/// Whether work is divided among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// It is computed by the calling thread.
    One,
    /// It is divided among those of the calling thread's pool, where that pays.
    Pool,
}
