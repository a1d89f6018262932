//! The threads that compute a kernel.

/// The division of work among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread computes everything.
    One,
    /// The threads of the calling thread's pool share the work if that is faster.
    Pool,
}

/// Minimum number of elements for which a single operation is divided among threads.
pub const LARGE: usize = 1 << 16;
