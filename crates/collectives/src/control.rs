//! Deadlines and failures: the knowledge that a group has of its ranks beside the bytes that they send.
//!
//! All of this is the same for every engine. An engine moves bytes, rings the world's bell when
//! something that a rank may wait for has changed, and carries [`News`] between processes.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

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
            tracing::error!(target: "burn_fsdp", rank, reason = %failure.reason, "a rank failed");
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
            left.map(Outcome::Left)
        };
        let bell = &self.world.bell;
        // Only a wait that has lasted for a tenth of the deadline costs more than its looks.
        let soon = self.deadline / 10;
        let mut outcome = bell.wait_for(soon, look);
        // Until this returns: an error has ended the domain by then.
        let _told = outcome.is_none().then(|| Told::new(self, wait));
        if outcome.is_none() {
            outcome = bell.wait_for(self.deadline - soon, look);
        }
        let operation = || Box::new(wait.operation.clone());
        let error = match outcome {
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

/// A wait that all ranks have been told of, until it is over.
struct Told<'a> {
    control: &'a Control,
    rank: usize,
}

impl<'a> Told<'a> {
    fn new(control: &'a Control, wait: &Wait<'_>) -> Self {
        let told = LongWait {
            missing: (wait.missing)(),
            what: format!("{} {}", wait.stage, wait.operation),
        };
        control.world.wait_of(wait.rank, Some(told));
        Self {
            control,
            rank: wait.rank,
        }
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        // After a failure it stays: it says what the rank did when all ended.
        if self.control.failure().is_none() {
            self.control.world.wait_of(self.rank, None);
        }
    }
}
