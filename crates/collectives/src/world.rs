//! The world: the state that the ranks of one launch share, regardless of their groups.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::bell::Bell;
use crate::lock::lock;
use crate::rank_state::RankState;
use crate::waits::{LongWait, LongWaits};
use crate::{Ledger, LedgerReport};

/// The ranks of one launch, as this process sees them.
#[derive(Debug)]
pub(crate) struct World {
    /// Number of the world, unique in the process.
    pub(crate) number: u64,
    /// The bell that wakes the waiting threads of this process.
    pub(crate) bell: Bell,
    /// Ranks that have returned and will start nothing more.
    departed: Vec<AtomicBool>,
    num_departed: AtomicUsize,
    pub(crate) waits: LongWaits,
    /// The state of each rank that lives in this process.
    ranks: Vec<Option<Arc<RankState>>>,
    messenger: Box<dyn Messenger>,
}

/// Notifies other processes of local events that they cannot observe.
pub(crate) trait Messenger: fmt::Debug + Send + Sync {
    /// Sends news to all other processes. Never waits for them.
    fn tell(&self, news: News);
}

/// The news that the processes of a world tell each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    /// A failure domain that has ended.
    Failed {
        /// The number of the domain; see [`Control`](crate::control::Control).
        domain: u64,
        /// The rank of the world that failed first.
        rank: usize,
        reason: String,
    },
    /// A rank of the world that has returned.
    Departed(usize),
    /// A rank of the world whose wait has lasted for a while, or that has continued after such a wait.
    Waits { rank: usize, wait: Option<LongWait> },
}

/// The messenger of a world that has one process.
#[derive(Debug)]
pub(crate) struct NobodyElse;

impl Messenger for NobodyElse {
    fn tell(&self, _: News) {}
}

impl World {
    /// Creates a world of the given ranks, with the state of each rank that lives here.
    pub(crate) fn new(ranks: Vec<Option<Arc<RankState>>>, messenger: Box<dyn Messenger>) -> Self {
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

    /// Returns the state of a rank, if it lives in this process.
    pub(crate) fn rank(&self, rank: usize) -> Option<&Arc<RankState>> {
        self.ranks[rank].as_ref()
    }

    /// Sends news to all other processes.
    pub(crate) fn tell(&self, news: News) {
        self.messenger.tell(news);
    }

    /// Announces, here and to the other processes, that a rank of this process will start nothing more.
    pub(crate) fn depart(&self, rank: usize) {
        self.has_departed(rank);
        self.tell(News::Departed(rank));
    }

    /// Announces, here and to the other processes, a long wait of a rank of this process; `None` if the rank continues.
    pub(crate) fn wait_of(&self, rank: usize, wait: Option<LongWait>) {
        self.waits.set(rank, wait.clone());
        self.tell(News::Waits { rank, wait });
    }

    /// Records that a rank will start nothing more.
    pub(crate) fn has_departed(&self, rank: usize) {
        if !self.departed[rank].swap(true, Ordering::AcqRel) {
            self.num_departed.fetch_add(1, Ordering::AcqRel);
        }
        self.bell.ring();
    }

    /// Returns one of the ranks in `missing` that will never take part.
    pub(crate) fn left(&self, missing: &dyn Fn() -> Vec<usize>) -> Option<usize> {
        // The cheap check first: this runs in a spin loop, and hardly any rank ever leaves early.
        if self.num_departed.load(Ordering::Acquire) == 0 {
            return None;
        }
        // Reads `departed` first and calls `missing` second, so that everything a rank did before it departed is seen
        // here.
        let departed: Vec<_> = self
            .departed
            .iter()
            .map(|departed| departed.load(Ordering::Acquire))
            .collect();
        missing().into_iter().find(|rank| departed[*rank])
    }

    /// Returns true if every rank has departed.
    #[cfg(feature = "mpi")]
    pub(crate) fn is_over(&self) -> bool {
        self.num_departed.load(Ordering::Acquire) == self.departed.len()
    }

    /// Returns the last operations of the ranks of this process.
    pub(crate) fn report(&self) -> LedgerReport {
        let ledger = |rank: &Option<Arc<RankState>>| -> Option<Ledger> {
            rank.as_ref().map(|rank| lock(&rank.ledger).clone())
        };
        let waits = self.waits.all();
        LedgerReport::new(self.ranks.iter().map(ledger).zip(waits))
    }
}
