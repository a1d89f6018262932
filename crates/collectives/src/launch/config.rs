//! The configuration of a launch.

use std::thread;
use std::time::Duration;

use super::error::LaunchError;
use crate::Check;

/// The most ranks that are started as threads of one process. What ranks tell each other is a table
/// of ranks by ranks, and no machine has as many cores.
pub(super) const MOST_THREADS: usize = 1024;

/// The most threads that a rank is given to compute with. No machine has as many cores.
const MOST_THREADS_OF_RANK: usize = 1024;

/// Rayon's variable with the number of threads of a pool.
const RAYON: &str = "RAYON_NUM_THREADS";

/// The configuration of a launch: number of ranks, deadline, grace period, threads.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    pub(super) ranks: usize,
    pub(super) deadline: Duration,
    pub(super) grace: Duration,
    threads_per_rank: Option<usize>,
    /// True if a rank with one thread gets a second worker, for what is spawned.
    pub(super) has_background: bool,
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
            has_background: true,
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

    /// Threads of each rank that compute; by default, and if 0, those that rayon's variable `RAYON_NUM_THREADS` gives a pool,
    /// and without it the cores divided by the ranks, at least 1.
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

    /// Leaves out the second worker of a rank with a single thread, so that this one does all that is computed: now and then
    /// the other takes a part of a kernel. Only for a body that spawns nothing on rayon: it would wait for that for ever.
    #[must_use]
    pub fn without_background(mut self) -> Self {
        self.has_background = false;
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

    /// Returns the threads that each rank is to compute with where this many ranks share the machine: see
    /// [`threads_per_rank`](Self::threads_per_rank).
    ///
    /// # Errors
    ///
    /// [`LaunchError::TooManyThreads`] if they are more than a rank is given, and [`LaunchError::Environment`] if
    /// `RAYON_NUM_THREADS` counts and is no number.
    pub fn num_threads(&self, ranks_here: usize) -> Result<usize, LaunchError> {
        self.num_threads_in(ranks_here, std::env::var(RAYON).ok())
    }

    /// The same with this value of the variable.
    fn num_threads_in(
        &self,
        ranks_here: usize,
        variable: Option<String>,
    ) -> Result<usize, LaunchError> {
        let cores = || thread::available_parallelism().map_or(1, |cores| cores.get());
        let given = match (self.threads_per_rank, variable) {
            (Some(threads), _) => Some(threads),
            (None, None) => None,
            (None, Some(text)) if text.trim().is_empty() => None,
            (None, Some(text)) => match text.trim().parse() {
                // Rayon's own default.
                Ok(0) => None,
                Ok(threads) => Some(threads),
                Err(_) => {
                    return Err(LaunchError::Environment {
                        variable: RAYON.to_owned(),
                        value: text,
                        expected: "a number of threads".to_owned(),
                    });
                }
            },
        };
        let most = MOST_THREADS_OF_RANK;
        match given {
            Some(threads) if threads > most => Err(LaunchError::TooManyThreads { threads, most }),
            Some(threads) => Ok(threads),
            None => Ok((cores() / ranks_here.max(1)).max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(config: LaunchConfig, variable: Option<&str>) -> Result<usize, LaunchError> {
        config.num_threads_in(1 << 20, variable.map(str::to_owned))
    }

    #[test]
    fn rayons_variable_is_obeyed_where_nothing_is_set() {
        let config = LaunchConfig::new(2);
        assert_eq!(threads(config, None).unwrap(), 1);
        assert_eq!(threads(config, Some("3")).unwrap(), 3);
        assert_eq!(threads(config, Some(" 1 ")).unwrap(), 1);
        // As rayon has it.
        assert_eq!(threads(config, Some("0")).unwrap(), 1);
        assert_eq!(threads(config, Some("")).unwrap(), 1);
        assert_eq!(threads(config.threads_per_rank(5), Some("3")).unwrap(), 5);
        assert_eq!(threads(config.threads_per_rank(5), Some("x")).unwrap(), 5);
    }

    #[test]
    fn numbers_of_threads_that_cannot_be_are_refused() {
        let config = LaunchConfig::new(2);
        for text in ["many", "-1", "1.5", "0x2"] {
            let message = threads(config, Some(text)).unwrap_err().to_string();
            assert!(message.contains("RAYON_NUM_THREADS"), "{message}");
            assert!(message.contains(text), "{message}");
        }
        for refused in [
            threads(config, Some("100000")),
            threads(config.threads_per_rank(100_000), None),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("100000 threads"), "{message}");
        }
    }
}
