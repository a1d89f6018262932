//! The configuration of a launch.

use std::thread;
use std::time::Duration;

use crate::Check;

/// The most ranks that are started as threads of one process. What ranks tell each other is a table
/// of ranks by ranks, and no machine has as many cores.
pub(super) const MOST_THREADS: usize = 1024;

/// The configuration of a launch: number of ranks, deadline, grace period, threads.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    pub(super) ranks: usize,
    pub(super) deadline: Duration,
    pub(super) grace: Duration,
    threads_per_rank: Option<usize>,
    pub(super) check: Check,
}

impl LaunchConfig {
    /// Configures this many ranks, with the defaults of the other methods.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            deadline: Duration::from_secs(600),
            grace: Duration::from_secs(2),
            threads_per_rank: None,
            check: Check::Calls,
        }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Sets how long a rank waits for its peers in one operation before it gives up, 10 minutes by default. It
    /// counts from the moment that the rank waits; a pause of the whole machine counts as a tenth of it. Groups
    /// that do work of another kind, such as checkpoints, may have their own: see
    /// [`ProcessGroup::isolate`](crate::ProcessGroup::isolate).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how long the remaining ranks have to return after one has failed, 2 seconds by default.
    /// Those that do not are abandoned: their threads go on on their own.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Threads of each rank that compute; by default the cores divided by the ranks, at least 1.
    /// 0 is the default, too.
    ///
    /// They are the workers of a rayon pool, one of which runs the body. A rank with a single one gets
    /// a second worker for work that is spawned in the background, by a data loader, say: it looks for
    /// such work every few milliseconds, so that it hardly takes part in anything else.
    ///
    /// Burn's CPU backend cuts the sum of all elements of a tensor of 4 million and more by which worker
    /// is free, so that its last digits may differ from run to run and from rank to rank.
    #[must_use]
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = (threads > 0).then_some(threads);
        self
    }

    /// Sets what ranks compare of each other, [`Check::Calls`] by default.
    ///
    /// ```
    /// use burn_fsdp_collectives::{Check, LaunchConfig, launch};
    ///
    /// let config = LaunchConfig::new(2).check(Check::Agreement);
    /// launch(config, |world| world.barrier("all bytes are compared from here on"))?;
    /// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
    /// ```
    #[must_use]
    pub fn check(mut self, check: Check) -> Self {
        self.check = check;
        self
    }

    /// Threads of a rank, where this many ranks share the machine.
    pub(super) fn num_threads(&self, ranks_here: usize) -> usize {
        let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
        self.threads_per_rank
            .unwrap_or_else(|| (cores() / ranks_here).max(1))
    }
}
