//! Deadlines and failures: the knowledge that a group has of its ranks beside the bytes that they send.
//!
//! All of this is the same for every engine. An engine moves bytes, rings the world's bell when
//! something that a rank may wait for has changed, and carries [`News`] between processes.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::waits::LongWait;
use crate::world::{News, World};
use crate::{Error, LedgerReport, Operation, Stage};

/// The number of the failure domain of all ranks.
pub(crate) const WORLD_DOMAIN: u64 = u64::MAX;

/// A failure domain: groups that fail together, and how long their ranks wait for each other.
///
/// The world is one. A group that was [isolated](crate::ProcessGroup::isolate) begins another inside
/// of it: what fails in there stays in there, what fails outside ends it too.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) world: Arc<World>,
    outer: Option<Arc<Control>>,
    /// The number of this domain, the same on all its ranks.
    domain: u64,
    deadline: Duration,
    /// The first failure; with it the domain has ended.
    failure: OnceLock<Failure>,
}

/// The reason why a failure domain has ended.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// The rank of the world that failed.
    pub(crate) rank: usize,
    pub(crate) reason: String,
    /// The last operations of the ranks when the domain ended.
    ledger: LedgerReport,
}

/// The event that a rank waits for.
pub(crate) struct Wait<'a> {
    /// A function that returns true if it has come about.
    pub(crate) is_over: &'a dyn Fn() -> bool,
    /// A function that returns the ranks of the world that have yet to do their part.
    pub(crate) missing: &'a dyn Fn() -> Vec<usize>,
    /// The part that they have yet to do.
    pub(crate) stage: Stage,
    /// The rank of the world that waits.
    pub(crate) rank: usize,
    pub(crate) operation: &'a Operation,
}

enum Outcome {
    Over,
    Failed,
    Left(usize),
}

impl Control {
    /// Returns the failure domain of all ranks of a world.
    pub(crate) fn of_world(world: World, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            world: Arc::new(world),
            outer: None,
            domain: WORLD_DOMAIN,
            deadline,
            failure: OnceLock::new(),
        })
    }

    /// Makes a domain inside of this one.
    pub(crate) fn isolate(self: &Arc<Self>, domain: u64, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            world: self.world.clone(),
            outer: Some(self.clone()),
            domain,
            deadline,
            failure: OnceLock::new(),
        })
    }

    /// Returns the number of this domain.
    #[cfg(feature = "mpi")]
    pub(crate) fn domain(&self) -> u64 {
        self.domain
    }

    /// Ends the domain, unless it has ended already, and tells all its ranks.
    pub(crate) fn fail(&self, rank: usize, reason: String) {
        if self.has_failed(rank, reason.clone()) {
            let domain = self.domain;
            self.world.tell(News::Failed {
                domain,
                rank,
                reason,
            });
        }
    }

    /// Ends the domain for the ranks of this process, unless it has ended already: `true` if not.
    pub(crate) fn has_failed(&self, rank: usize, reason: String) -> bool {
        let mut is_first = false;
        let failure = self.failure.get_or_init(|| {
            is_first = true;
            Failure {
                rank,
                reason,
                ledger: self.world.report(),
            }
        });
        if is_first {
            tracing::error!(rank, reason = %failure.reason, "a rank failed");
            self.world.bell.ring();
        }
        is_first
    }

    /// Returns the failure that has ended the domain, or one around it, if any.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        let outer = || self.outer.as_ref().and_then(|outer| outer.failure());
        self.failure.get().or_else(outer)
    }

    /// Fails if the domain has ended.
    pub(crate) fn check(&self, operation: &Operation) -> Result<(), Error> {
        match self.failure() {
            None => Ok(()),
            Some(Failure {
                rank,
                reason,
                ledger,
            }) => Err(Error::PeerFailed {
                rank: *rank,
                reason: reason.clone(),
                operation: Box::new(operation.clone()),
                ledger: ledger.clone(),
            }),
        }
    }

    /// Waits until it is over, a rank fails or leaves, or the deadline passes. Errors end the domain.
    pub(crate) fn wait(&self, wait: &Wait<'_>) -> Result<(), Error> {
        let long = Long::new(self, wait);
        let look = || {
            if (wait.is_over)() {
                return Some(Outcome::Over);
            }
            if self.failure().is_some() {
                return Some(Outcome::Failed);
            }
            // What a rank has started comes to its end without it.
            let left = match wait.stage {
                Stage::Start => self.world.left(wait.missing),
                Stage::Finish => None,
            };
            long.look();
            left.map(Outcome::Left)
        };
        let operation = || Box::new(wait.operation.clone());
        let error = match self.world.bell.wait_for(self.deadline, look) {
            Some(Outcome::Over) => return Ok(()),
            Some(Outcome::Failed) => return self.check(wait.operation),
            Some(Outcome::Left(rank)) => Error::PeerLeft {
                rank,
                operation: operation(),
                ledger: self.report(),
            },
            None => {
                let missing = (wait.missing)();
                Error::Timeout {
                    rank: wait.rank,
                    ends: self.world.waits.ends(wait.rank, &missing),
                    missing,
                    stage: wait.stage,
                    operation: operation(),
                    deadline: self.deadline,
                    ledger: self.report(),
                }
            }
        };
        Err(self.end_with(wait.rank, error))
    }

    /// Ends the domain with an error that a rank is about to return.
    pub(crate) fn end_with(&self, rank: usize, error: Error) -> Error {
        self.fail(rank, error.to_string());
        error
    }

    /// Returns the last operations of the ranks: before the domain ended, if it has. One report
    /// serves all ranks, since each is as long as there are ranks.
    pub(crate) fn report(&self) -> LedgerReport {
        match self.failure() {
            Some(failure) => failure.ledger.clone(),
            None => self.world.report(),
        }
    }
}

/// A look at how long a wait lasts: once it has lasted for a while all ranks are told, and again when
/// it is over.
struct Long<'a> {
    control: &'a Control,
    wait: &'a Wait<'a>,
    began: Instant,
    is_told: Cell<bool>,
}

impl<'a> Long<'a> {
    fn new(control: &'a Control, wait: &'a Wait<'a>) -> Self {
        Self {
            control,
            wait,
            began: Instant::now(),
            is_told: Cell::new(false),
        }
    }

    fn look(&self) {
        // A tenth of the deadline, as often as a rank that sleeps looks.
        if self.is_told.get() || self.began.elapsed() < self.control.deadline / 10 {
            return;
        }
        self.is_told.set(true);
        let Wait {
            stage, operation, ..
        } = self.wait;
        let wait = LongWait {
            missing: (self.wait.missing)(),
            what: format!("{stage} {operation}"),
        };
        self.control.world.wait_of(self.wait.rank, Some(wait));
    }
}

impl Drop for Long<'_> {
    fn drop(&mut self) {
        // After a failure it stays: it says what the rank did when all ended.
        if self.is_told.get() && self.control.failure().is_none() {
            self.control.world.wait_of(self.wait.rank, None);
        }
    }
}
