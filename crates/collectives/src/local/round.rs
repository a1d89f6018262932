//! Where the ranks of a group meet for one operation.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::Source;
use crate::engine::Claim;
use crate::lock::lock;

/// One operation of one group. Kept alive by the ranks that are not done with it.
#[derive(Debug)]
pub(super) struct Round {
    seats: Vec<Seat>,
    num_arrived: AtomicUsize,
    num_finished: AtomicUsize,
    /// All ranks have finished, and nothing published is kept any more.
    released: AtomicBool,
    /// Slices of an all-reduce that are combined, by the rank that they fall to.
    slices: Vec<Slice>,
    num_slices: AtomicUsize,
}

/// One rank's place.
#[derive(Debug, Default)]
struct Seat {
    /// What the rank wants and tells; stays until the round is dropped.
    claim: OnceLock<Claim>,
    /// What the rank shows to its peers; taken away as soon as no peer will look again.
    sources: Mutex<Option<Sources>>,
    finished: AtomicBool,
}

/// One rank's sources, one per part.
pub(super) type Sources = Arc<[Source]>;

/// What a rank publishes.
#[derive(Debug)]
pub(super) struct Offer {
    claim: Claim,
    sources: Sources,
}

#[derive(Debug, Default)]
struct Slice {
    taken_by: OnceLock<usize>,
    parts: Mutex<Option<Sources>>,
}

impl Offer {
    pub(super) fn new(claim: Claim, sources: Vec<Source>) -> Self {
        Self {
            claim,
            sources: sources.into(),
        }
    }
}

impl Round {
    pub(super) fn new(num_ranks: usize) -> Self {
        Self {
            seats: (0..num_ranks).map(|_| Seat::default()).collect(),
            num_arrived: AtomicUsize::new(0),
            num_finished: AtomicUsize::new(0),
            released: AtomicBool::new(false),
            slices: (0..num_ranks).map(|_| Slice::default()).collect(),
            num_slices: AtomicUsize::new(0),
        }
    }

    /// Publishes a rank's part; once per rank.
    pub(super) fn publish(&self, rank: usize, offer: Offer) {
        let seat = &self.seats[rank];
        *lock(&seat.sources) = Some(offer.sources);
        let claimed = seat.claim.set(offer.claim);
        debug_assert!(claimed.is_ok(), "rank {rank} came twice");
        self.num_arrived.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether all ranks have published.
    pub(super) fn has_all(&self) -> bool {
        self.num_arrived.load(Ordering::Acquire) == self.seats.len()
    }

    /// Whether a rank has published.
    pub(super) fn has(&self, rank: usize) -> bool {
        self.seats[rank].claim.get().is_some()
    }

    /// What a rank that has published wants and tells.
    pub(super) fn claim(&self, rank: usize) -> &Claim {
        self.seats[rank]
            .claim
            .get()
            .expect("read after the ranks have met")
    }

    /// A rank's sources, if they are still there.
    pub(super) fn sources(&self, rank: usize) -> Option<Sources> {
        lock(&self.seats[rank].sources).clone()
    }

    /// Takes a rank's sources back: no peer will look at them again.
    pub(super) fn withdraw(&self, rank: usize) {
        // The guard is gone before the sources are dropped: freeing them may take long.
        let sources = lock(&self.seats[rank].sources).take();
        drop(sources);
    }

    /// Says that a rank will read nothing more. The caller has dropped all that it got from
    /// [`sources`](Self::sources) and [`slice`](Self::slice). The last rank empties the round; `true`
    /// for that one.
    pub(super) fn finish(&self, rank: usize) -> bool {
        self.seats[rank].finished.store(true, Ordering::Release);
        if self.num_finished.fetch_add(1, Ordering::AcqRel) + 1 < self.seats.len() {
            return false;
        }
        for (rank, slice) in self.slices.iter().enumerate() {
            self.withdraw(rank);
            let parts = lock(&slice.parts).take();
            drop(parts);
        }
        self.released.store(true, Ordering::Release);
        true
    }

    /// Whether a rank has finished.
    pub(super) fn has_finished(&self, rank: usize) -> bool {
        self.seats[rank].finished.load(Ordering::Acquire)
    }

    /// Whether all ranks have finished and everything published is dropped.
    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Gives `rank` the task of combining a slice, unless another has it already.
    pub(super) fn take_slice(&self, slice: usize, rank: usize) -> bool {
        self.slices[slice].taken_by.set(rank).is_ok()
    }

    /// Publishes a combined slice, one source per part.
    pub(super) fn publish_slice(&self, slice: usize, parts: Vec<Source>) {
        *lock(&self.slices[slice].parts) = Some(parts.into());
        self.num_slices.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether all slices are published.
    pub(super) fn has_all_slices(&self) -> bool {
        self.num_slices.load(Ordering::Acquire) == self.slices.len()
    }

    /// Whether all slices that a rank has taken are published.
    pub(super) fn has_combined(&self, rank: usize) -> bool {
        let mut taken = self
            .slices
            .iter()
            .filter(|slice| slice.taken_by.get() == Some(&rank));
        taken.all(|slice| lock(&slice.parts).is_some())
    }

    /// A combined slice, if it is there.
    pub(super) fn slice(&self, slice: usize) -> Option<Sources> {
        lock(&self.slices[slice].parts).clone()
    }
}
