//! What all ranks of a process share, whatever groups they are in.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::bell::Bell;
use super::group::LocalGroup;
use crate::lock::lock;
use crate::rank_state::RankState;
use crate::{Error, LedgerReport, Operation, ProcessGroup, Stage};

/// The ranks of one launch.
#[derive(Debug)]
pub(crate) struct World {
    pub(super) ranks: Vec<Arc<RankState>>,
    pub(super) bell: Bell,
    deadline: Duration,
    /// The first failure; with it the world has ended.
    failure: OnceLock<Failure>,
    /// Ranks that have returned and will start nothing more.
    departed: Vec<AtomicBool>,
}

/// Why the world has ended.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) reason: String,
}

/// What a rank waits for.
pub(super) struct Wait<'a> {
    /// Whether it has come about.
    pub(super) is_over: &'a dyn Fn() -> bool,
    /// The ranks of the world that have yet to do their part.
    pub(super) missing: &'a dyn Fn() -> Vec<usize>,
    /// What that part is.
    pub(super) stage: Stage,
    /// The rank of the world that waits.
    pub(super) rank: usize,
    pub(super) operation: &'a Operation,
}

enum Outcome {
    Over,
    Failed,
    Left(usize),
}

impl World {
    pub(crate) fn new(num_ranks: usize, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            ranks: (0..num_ranks)
                .map(|rank| Arc::new(RankState::new(rank)))
                .collect(),
            bell: Bell::default(),
            deadline,
            failure: OnceLock::new(),
            departed: (0..num_ranks).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// The ends of the group of all ranks, by rank.
    pub(crate) fn groups(self: &Arc<Self>) -> Vec<ProcessGroup> {
        let members: Vec<_> = (0..self.ranks.len()).collect();
        let group = LocalGroup::new(self.clone(), members.clone());
        let end = |(rank, state): (usize, &Arc<RankState>)| {
            let engine = Box::new(LocalGroup::end(&group, rank));
            ProcessGroup::new("world".into(), rank, members.clone(), engine, state.clone())
        };
        self.ranks.iter().enumerate().map(end).collect()
    }

    /// Ends the world, unless it has ended already.
    pub(crate) fn fail(&self, rank: usize, reason: String) {
        let mut is_first = false;
        let failure = self.failure.get_or_init(|| {
            is_first = true;
            Failure { rank, reason }
        });
        if is_first {
            tracing::error!(rank, reason = %failure.reason, "a rank failed");
            self.bell.ring();
        }
    }

    /// Why the world has ended, if it has.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Says that a rank will start nothing more.
    pub(crate) fn depart(&self, rank: usize) {
        self.departed[rank].store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Fails if the world has ended.
    pub(super) fn check(&self, operation: &Operation) -> Result<(), Error> {
        match self.failure() {
            None => Ok(()),
            Some(Failure { rank, reason }) => Err(Error::PeerFailed {
                rank: *rank,
                reason: reason.clone(),
                operation: Box::new(operation.clone()),
                ledger: self.report(),
            }),
        }
    }

    /// Waits until it is over, a rank fails or leaves, or the deadline passes. Errors end the world.
    pub(super) fn wait(&self, wait: &Wait<'_>) -> Result<(), Error> {
        let look = || {
            if (wait.is_over)() {
                return Some(Outcome::Over);
            }
            if self.failure.get().is_some() {
                return Some(Outcome::Failed);
            }
            self.left(wait).map(Outcome::Left)
        };
        let operation = || Box::new(wait.operation.clone());
        let error = match self.bell.wait_for(self.deadline, look) {
            Some(Outcome::Over) => return Ok(()),
            Some(Outcome::Failed) => return self.check(wait.operation),
            Some(Outcome::Left(rank)) => Error::PeerLeft {
                rank,
                operation: operation(),
                ledger: self.report(),
            },
            None => Error::Timeout {
                rank: wait.rank,
                missing: (wait.missing)(),
                stage: wait.stage,
                operation: operation(),
                deadline: self.deadline,
                ledger: self.report(),
            },
        };
        Err(self.end_with(wait.rank, error))
    }

    /// Ends the world with an error that a rank is about to return.
    pub(super) fn end_with(&self, rank: usize, error: Error) -> Error {
        self.fail(rank, error.to_string());
        error
    }

    /// What all ranks did last.
    pub(super) fn report(&self) -> LedgerReport {
        LedgerReport::new(self.ranks.iter().map(|rank| lock(&rank.ledger).clone()))
    }

    /// A rank that will never do its part.
    fn left(&self, wait: &Wait<'_>) -> Option<usize> {
        // Cheap first: this runs in a spin loop, and hardly any rank ever leaves early.
        let departed = |rank: &usize| self.departed[*rank].load(Ordering::Acquire);
        if !(0..self.departed.len()).any(|rank| departed(&rank)) {
            return None;
        }
        // Departed first, missing second: what a rank did before it departed is seen here.
        let departed: Vec<_> = (0..self.departed.len()).filter(departed).collect();
        (wait.missing)()
            .into_iter()
            .find(|rank| departed.contains(rank))
    }
}
