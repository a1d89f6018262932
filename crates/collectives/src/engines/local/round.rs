//! The state that the ranks of a group share for one operation.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use burn_fsdp_rendezvous::{Claim, Meeting};
use burn_fsdp_transport::Source;
use parking_lot::Mutex;

/// An operation of one group. The ranks that still use it keep it alive.
#[derive(Debug)]
pub(super) struct Round {
    seats: Vec<Seat>,
    num_arrived: AtomicUsize,
    num_finished: AtomicUsize,
    /// True once all ranks have finished and all published data is dropped.
    released: AtomicBool,
    /// The combined slices of an all-reduce, by the rank that they are assigned to.
    slices: Vec<Slice>,
    num_slices: AtomicUsize,
}

/// The state of one rank in the round.
#[derive(Debug, Default)]
struct Seat {
    /// The rank's claim, which is kept until the round is dropped.
    claim: OnceLock<Claim>,
    /// The sources that peers read, removed as soon as no peer will read them again.
    sources: Mutex<Option<Sources>>,
    finished: AtomicBool,
}

/// The sources of one rank, one per part.
pub(super) type Sources = Arc<[Source]>;

/// The claim and the sources that a rank publishes.
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

    /// Publishes a rank's part. Called once per rank.
    pub(super) fn publish(&self, rank: usize, offer: Offer) {
        let seat = &self.seats[rank];
        *seat.sources.lock() = Some(offer.sources);
        let claimed = seat.claim.set(offer.claim);
        debug_assert!(claimed.is_ok(), "rank {rank} arrived twice");
        // Last, so a rank that counts all arrivals also sees every source and claim.
        self.num_arrived.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns true if all ranks have published.
    pub(super) fn has_all(&self) -> bool {
        self.num_arrived.load(Ordering::Acquire) == self.seats.len()
    }

    /// Returns a rank's sources, unless they were removed.
    pub(super) fn sources(&self, rank: usize) -> Option<Sources> {
        self.seats[rank].sources.lock().clone()
    }

    /// Removes a rank's sources. No peer will read them again.
    pub(super) fn withdraw(&self, rank: usize) {
        // The guard is released before the sources are dropped, because freeing them may take a long time.
        let sources = self.seats[rank].sources.lock().take();
        drop(sources);
    }

    /// Marks a rank as done reading. The caller must have dropped everything that it took from
    /// [`sources`](Self::sources) and [`slice`](Self::slice). If the rank is the last, empties the round and returns
    /// true.
    pub(super) fn finish(&self, rank: usize) -> bool {
        self.seats[rank].finished.store(true, Ordering::Release);
        if self.num_finished.fetch_add(1, Ordering::AcqRel) + 1 < self.seats.len() {
            return false;
        }
        for (rank, slice) in self.slices.iter().enumerate() {
            self.withdraw(rank);
            let parts = slice.parts.lock().take();
            drop(parts);
        }
        // Last: a rank that sees it may assume that no other rank holds the memory of its sources.
        self.released.store(true, Ordering::Release);
        true
    }

    /// Returns true if a rank has finished.
    pub(super) fn has_finished(&self, rank: usize) -> bool {
        self.seats[rank].finished.load(Ordering::Acquire)
    }

    /// Returns true if all ranks have finished and all published data is dropped.
    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Assigns a slice to `rank`, which must combine it. Returns false if another rank already has it.
    pub(super) fn take_slice(&self, slice: usize, rank: usize) -> bool {
        self.slices[slice].taken_by.set(rank).is_ok()
    }

    /// Publishes a combined slice, one source per part.
    pub(super) fn publish_slice(&self, slice: usize, parts: Vec<Source>) {
        *self.slices[slice].parts.lock() = Some(parts.into());
        self.num_slices.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns true if all slices are published.
    pub(super) fn has_all_slices(&self) -> bool {
        self.num_slices.load(Ordering::Acquire) == self.slices.len()
    }

    /// Returns true if all slices that a rank has taken are published.
    pub(super) fn has_combined(&self, rank: usize) -> bool {
        let mut taken = self
            .slices
            .iter()
            .filter(|slice| slice.taken_by.get() == Some(&rank));
        taken.all(|slice| slice.parts.lock().is_some())
    }

    /// Returns a combined slice, if it is published.
    pub(super) fn slice(&self, slice: usize) -> Option<Sources> {
        self.slices[slice].parts.lock().clone()
    }
}

impl Meeting for Round {
    fn is_complete(&self) -> bool {
        self.has_all()
    }

    fn absent(&self) -> Vec<usize> {
        let is_absent = |rank: &usize| self.seats[*rank].claim.get().is_none();
        (0..self.seats.len()).filter(is_absent).collect()
    }

    fn claim(&self, rank: usize) -> &Claim {
        let claim = self.seats[rank].claim.get();
        claim.expect("read after the ranks have met")
    }
}
