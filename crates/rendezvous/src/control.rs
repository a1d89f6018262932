//! Deadlines and failures: what ranks learn about each other apart from the bytes that they exchange.
//!
//! All of this is the same for every engine. An engine moves bytes, rings the world's bell when something changes that
//! a rank may wait for, and carries [`News`] between processes.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::error::{Error, Stage};
use super::ledger::LedgerReport;
use super::operation::Operation;
use super::waits::LongWait;
use super::world::{News, World};

/// The number of the failure domain of all ranks.
pub const WORLD_DOMAIN: u64 = u64::MAX;

/// A failure domain: groups that fail together, and the deadline of their waits.
///
/// The world is one domain. An isolated group (`ProcessGroup::isolate`) begins another one inside it. A failure
/// inside stays there, and a failure outside also ends the inner domain.
#[derive(Debug)]
pub struct Control {
    world: Arc<World>,
    outer: Option<Arc<Control>>,
    /// The number of this domain, the same on all its ranks.
    domain: u64,
    deadline: Duration,
    /// The first failure; it ends the domain.
    failure: OnceLock<Failure>,
}

/// The reason why a failure domain has ended.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The rank of the world that failed.
    pub rank: usize,
    /// The description of the failure.
    pub reason: String,
    /// The last operations of the ranks when the domain ended.
    ledger: LedgerReport,
}

/// The event that a rank waits for.
pub struct Wait<'a> {
    /// Returns true if the event has happened.
    pub is_over: &'a dyn Fn() -> bool,
    /// Returns the ranks of the world that have yet to do their part of the operation.
    pub missing: &'a dyn Fn() -> Vec<usize>,
    /// The part of the operation that the missing ranks have yet to do.
    pub stage: Stage,
    /// The rank of the world that waits.
    pub rank: usize,
    /// The operation that the rank waits in.
    pub operation: &'a Operation,
}

impl fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            stage,
            operation,
            ..
        } = self;
        write!(f, "Wait of rank {rank} to {stage} {operation}")
    }
}

enum Outcome {
    Over,
    Failed,
    Left(usize),
}

impl Control {
    /// Returns the failure domain of all ranks of a world.
    pub fn of_world(world: World, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            world: Arc::new(world),
            outer: None,
            domain: WORLD_DOMAIN,
            deadline,
            failure: OnceLock::new(),
        })
    }

    /// Creates a domain inside this one.
    pub fn isolate(self: &Arc<Self>, domain: u64, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            world: self.world.clone(),
            outer: Some(self.clone()),
            domain,
            deadline,
            failure: OnceLock::new(),
        })
    }

    /// Returns the state that the ranks of all domains share.
    #[inline]
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Wakes the waiting threads of this process to look for a change that the caller has made.
    #[inline]
    pub fn ring(&self) {
        self.world.bell.ring();
    }

    /// Returns true if a thread of this process waits.
    pub fn is_awaited(&self) -> bool {
        self.world.bell.is_awaited()
    }

    /// Returns the number of this domain.
    pub fn domain(&self) -> u64 {
        self.domain
    }

    /// Ends the domain, unless it has already ended, and notifies all its ranks.
    pub fn fail(&self, rank: usize, reason: String) {
        if self.has_failed(rank, reason.clone()) {
            let domain = self.domain;
            self.world.tell(News::Failed {
                domain,
                rank,
                reason,
            });
        }
    }

    /// Ends the domain for the ranks of this process only. Returns true if the domain had not already ended.
    pub fn has_failed(&self, rank: usize, reason: String) -> bool {
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

    /// Returns the failure that ended this domain or an enclosing one, if any.
    #[inline]
    pub fn failure(&self) -> Option<&Failure> {
        let outer = || self.outer.as_ref().and_then(|outer| outer.failure());
        self.failure.get().or_else(outer)
    }

    /// Checks that neither this domain nor an enclosing one has ended, on behalf of `operation`.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`] with the failure that ended the domain.
    #[inline]
    pub fn check(&self, operation: &Operation) -> Result<(), Error> {
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

    /// Waits until the event happens.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`] if the domain has ended; [`Error::PeerLeft`] if a rank has departed without starting the
    /// operation; [`Error::Timeout`] after the deadline. The last two end the domain.
    pub fn wait(&self, wait: &Wait<'_>) -> Result<(), Error> {
        let look = || {
            if (wait.is_over)() {
                return Some(Outcome::Over);
            }
            if self.failure().is_some() {
                return Some(Outcome::Failed);
            }
            // Operations that a departed rank has started complete without it.
            let left = match wait.stage {
                Stage::Start => self.world.left(wait.missing),
                Stage::Finish => None,
            };
            left.map(Outcome::Left)
        };
        let bell = &self.world.bell;
        // A wait shorter than a tenth of the deadline costs only its polls.
        let soon = self.deadline / 10;
        let mut outcome = bell.wait_for(soon, look);
        // Dropped on return; an error has ended the domain by then.
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

    /// Ends the domain with an error, and returns the error.
    pub fn end_with(&self, rank: usize, error: Error) -> Error {
        self.fail(rank, error.to_string());
        error
    }

    /// Returns the last operations of the ranks, as of the end of the domain if it has ended. All ranks share one
    /// report, because its length is proportional to the number of ranks.
    pub fn report(&self) -> LedgerReport {
        match self.failure() {
            Some(failure) => failure.ledger.clone(),
            None => self.world.report(),
        }
    }
}

/// The announcement of a wait to all ranks. Dropping it announces that the wait is over.
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
        // After a failure the announcement stays, to report what the rank was doing when everything ended.
        if self.control.failure().is_none() {
            self.control.world.wait_of(self.rank, None);
        }
    }
}
