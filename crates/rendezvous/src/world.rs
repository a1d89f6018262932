//! The world: the state that the ranks of one launch share, regardless of their groups.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::bell::Bell;
use super::ledger::{Ledger, LedgerReport};
use super::rank_state::RankState;
use super::waits::{LongWait, LongWaits};

/// The ranks of one launch, as this process sees them.
#[derive(Debug)]
pub struct World {
    /// Number of the world, unique in the process.
    number: u64,
    /// The bell that wakes the waiting threads of this process.
    pub(super) bell: Bell,
    /// Ranks that have returned and will start no more operations.
    departed: Vec<AtomicBool>,
    num_departed: AtomicUsize,
    pub(super) waits: LongWaits,
    /// The state of each rank that lives in this process.
    ranks: Vec<Option<Arc<RankState>>>,
    messenger: Box<dyn Messenger>,
}

/// Notifies other processes of local events that they cannot observe.
pub trait Messenger: fmt::Debug + Send + Sync {
    /// Sends news to all other processes. Never waits for them.
    fn tell(&self, news: News);
}

/// A message from one process of a world to all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A failure domain that has ended.
    Failed {
        /// The number of the domain; see [`Control`](super::Control).
        domain: u64,
        /// The rank of the world that failed first.
        rank: usize,
        /// The description of the failure.
        reason: String,
    },
    /// A rank of the world that has returned.
    Departed(usize),
    /// A rank of the world that has waited for long, or has continued after a long wait.
    Waits {
        /// The rank that waits, or has continued.
        rank: usize,
        /// The wait; `None` if the rank has continued.
        wait: Option<LongWait>,
    },
}

/// The messenger of a world that has one process.
#[derive(Debug)]
pub struct NobodyElse;

impl Messenger for NobodyElse {
    fn tell(&self, _: News) {}
}

impl World {
    /// Creates a world. `ranks` has the state of each rank that lives in this process, and `None` for every other rank.
    pub fn new(ranks: Vec<Option<Arc<RankState>>>, messenger: Box<dyn Messenger>) -> Self {
        static NUM_WORLDS: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NUM_WORLDS.fetch_add(1, Ordering::Relaxed),
            bell: Bell::default(),
            departed: ranks.iter().map(|_| AtomicBool::new(false)).collect(),
            num_departed: AtomicUsize::new(0),
            waits: LongWaits::new(ranks.len()),
            ranks,
            messenger,
        }
    }

    /// Returns the number of the world, unique in the process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Records the wait of a rank of another process; `None` if the rank no longer waits.
    pub fn waits(&self, rank: usize, wait: Option<LongWait>) {
        self.waits.set(rank, wait);
    }

    /// Sends news to all other processes.
    pub(super) fn tell(&self, news: News) {
        self.messenger.tell(news);
    }

    /// Announces, here and to the other processes, that a rank of this process will start no more operations.
    pub fn depart(&self, rank: usize) {
        self.has_departed(rank);
        self.tell(News::Departed(rank));
    }

    /// Announces, here and to the other processes, a long wait of a rank of this process; `None` if the rank continues.
    pub(super) fn wait_of(&self, rank: usize, wait: Option<LongWait>) {
        self.waits.set(rank, wait.clone());
        self.tell(News::Waits { rank, wait });
    }

    /// Records that a rank will start no more operations.
    pub fn has_departed(&self, rank: usize) {
        if !self.departed[rank].swap(true, Ordering::AcqRel) {
            self.num_departed.fetch_add(1, Ordering::AcqRel);
        }
        self.bell.ring();
    }

    /// Returns one of the `missing` ranks that has departed and so will never do its part, if there is one.
    pub(super) fn left(&self, missing: &dyn Fn() -> Vec<usize>) -> Option<usize> {
        // The cheap check first: this runs in a spin loop, and hardly any rank ever leaves early.
        if self.num_departed.load(Ordering::Acquire) == 0 {
            return None;
        }
        // Reads `departed` before it calls `missing`, so everything a rank did before it departed is seen here.
        let departed: Vec<_> = self
            .departed
            .iter()
            .map(|departed| departed.load(Ordering::Acquire))
            .collect();
        missing().into_iter().find(|rank| departed[*rank])
    }

    /// Waits until `look` returns a value, and returns it; `None` if `look` returns none before the deadline.
    pub fn wait_for<T>(&self, deadline: Duration, look: impl FnMut() -> Option<T>) -> Option<T> {
        self.bell.wait_for(deadline, look)
    }

    /// Returns true if every rank has departed.
    pub fn is_over(&self) -> bool {
        self.num_departed.load(Ordering::Acquire) == self.departed.len()
    }

    /// Returns the last operations of the ranks of this process.
    pub(super) fn report(&self) -> LedgerReport {
        let ledger = |rank: &Option<Arc<RankState>>| -> Option<Ledger> {
            rank.as_ref().map(|rank| rank.ledger())
        };
        let waits = self.waits.all();
        LedgerReport::new(self.ranks.iter().map(ledger).zip(waits))
    }
}
