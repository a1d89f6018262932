//! The configuration of a launch.

use std::thread;
use std::time::Duration;

use super::error::LaunchError;
use burn_fsdp_rendezvous::Check;

/// Maximum number of thread ranks in a process. Ranks exchange a table of ranks by ranks, and no machine has this many
/// cores.
pub(super) const MOST_THREADS: usize = 1024;

/// Maximum number of compute threads of a rank, above the number of cores of any machine.
const MOST_THREADS_OF_RANK: usize = 1024;

/// Rayon's variable for the number of threads of a pool.
const RAYON: &str = "RAYON_NUM_THREADS";

/// The configuration of a launch: number of ranks, deadline, grace period, threads.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    pub(super) ranks: usize,
    pub(super) deadline: Duration,
    pub(super) grace: Duration,
    threads_per_rank: Option<usize>,
    /// True if a rank with one thread gets a second worker for spawned work.
    pub(super) has_background: bool,
    pub(super) check: Check,
}

impl LaunchConfig {
    /// Returns a configuration of this many ranks, with defaults for all other settings.
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

    /// Sets the time that a rank waits for its peers in one operation before it gives up. The default is 10 minutes.
    /// The time starts when the rank begins to wait. A pause of the whole machine counts as at most a tenth of it.
    /// Groups that do other kinds of work, such as checkpoints, may have their own deadline: see
    /// [`ProcessGroup::isolate`](crate::ProcessGroup::isolate).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the time that the remaining ranks have to return after one has failed. The default is 2 seconds. Ranks that
    /// do not return in time are abandoned, and their threads keep running.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets the number of compute threads of each rank. If it is 0 or not set, rayon's variable `RAYON_NUM_THREADS`
    /// determines it. Without that variable it is the number of cores divided by the number of ranks, at least 1.
    ///
    /// The threads are the workers of a rayon pool, and one of them runs the body. A rank with one compute thread gets
    /// a second worker for work that is spawned in the background, for example by a data loader. That worker looks for
    /// such work every few milliseconds, so it hardly takes part in anything else.
    ///
    /// Burn's CPU backend splits the sum of all elements of a large tensor, of at least 4 million elements, among the
    /// free workers. The last digits of these sums may therefore differ from run to run and from rank to rank.
    #[must_use]
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = (threads > 0).then_some(threads);
        self
    }

    /// Omits the second worker of a rank with one compute thread, which would occasionally take part in a kernel. Use
    /// it only if the body spawns nothing on rayon; otherwise the body would wait for spawned work forever.
    #[must_use]
    pub fn without_background(mut self) -> Self {
        self.has_background = false;
        self
    }

    /// Sets what ranks compare with each other; the default is [`Check::Calls`].
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

    /// Returns the number of compute threads of each rank if this many ranks share the machine; see
    /// [`threads_per_rank`](Self::threads_per_rank).
    ///
    /// # Errors
    ///
    /// [`LaunchError::TooManyThreads`] if the number is above the maximum for a rank, and [`LaunchError::Environment`]
    /// if `RAYON_NUM_THREADS` is used and is not a number.
    pub fn num_threads(&self, ranks_here: usize) -> Result<usize, LaunchError> {
        self.num_threads_in(ranks_here, std::env::var(RAYON).ok())
    }

    /// Like [`num_threads`](Self::num_threads), with this value of `RAYON_NUM_THREADS`.
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
    fn rayons_variable_is_the_default() {
        let config = LaunchConfig::new(2);
        assert_eq!(threads(config, None).unwrap(), 1);
        assert_eq!(threads(config, Some("3")).unwrap(), 3);
        assert_eq!(threads(config, Some(" 1 ")).unwrap(), 1);
        // As in rayon.
        assert_eq!(threads(config, Some("0")).unwrap(), 1);
        assert_eq!(threads(config, Some("")).unwrap(), 1);
        assert_eq!(threads(config.threads_per_rank(5), Some("3")).unwrap(), 5);
        assert_eq!(threads(config.threads_per_rank(5), Some("x")).unwrap(), 5);
    }

    #[test]
    fn invalid_thread_counts_are_rejected() {
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
