//! Operations that have started.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::engine::{Flight, Received};
use crate::ledger::EntryState;
use crate::lock::lock;
use crate::rank_state::RankState;
use crate::{CommStage, Error, Operation};

/// An operation that this rank has started and not yet waited for. It owns the operation's sources
/// and buffers.
///
/// With the `local` engine the transfer itself runs inside [`wait`](Self::wait), on the calling
/// thread: starting early lets peers finish early, it does not move bytes in the background.
/// Pending operations can be waited for in any order, and a wait depends on nothing but that every
/// rank of the group *starts* the operation.
///
/// Dropping it unfinished discards it: this rank's part is complete, the peers get their results as
/// if it had been waited for, and this rank's buffers go back to their pool.
#[must_use = "an operation that is dropped is discarded: wait for it"]
pub struct Pending<T = Received> {
    flight: Box<dyn Flight>,
    entry: Entry,
    finish: fn(Received) -> T,
}

impl<T> Pending<T> {
    pub(crate) fn new(flight: Box<dyn Flight>, entry: Entry, finish: fn(Received) -> T) -> Self {
        Self {
            flight,
            entry,
            finish,
        }
    }

    /// The same operation with another view of its result.
    pub(crate) fn map<U>(self, finish: fn(Received) -> U) -> Pending<U> {
        Pending {
            flight: self.flight,
            entry: self.entry,
            finish,
        }
    }

    /// Which operation this is.
    pub fn operation(&self) -> &Operation {
        &self.entry.operation
    }

    /// Waits until this rank's result is there. Peers may still be reading this rank's sources.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`], [`Error::PeerFailed`], [`Error::PeerLeft`] or [`Error::Timeout`], never
    /// later than the deadline of the world plus the transfer itself.
    pub fn wait(mut self) -> Result<T, Error> {
        let start = Instant::now();
        let received = self.flight.wait();
        self.settle(received, start)
    }

    /// Waits until this rank's result is there, all peers have finished or discarded the operation,
    /// and its references to the sources are dropped: if it held the last ones, their memory is free.
    ///
    /// Peers finish when *they* wait. Where several operations are pending, all ranks must therefore
    /// wait for them in the same order.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); the deadline holds for both halves.
    pub fn wait_released(mut self) -> Result<T, Error> {
        let start = Instant::now();
        let received = self.flight.wait().and_then(|received| {
            self.flight.wait_released()?;
            Ok(received)
        });
        self.settle(received, start)
    }

    /// Drops the operation, and says so: this rank does not want the result.
    pub fn discard(self) {}

    fn settle(mut self, received: Result<Received, Error>, start: Instant) -> Result<T, Error> {
        let Entry {
            rank,
            operation,
            bytes,
            ..
        } = &self.entry;
        rank.note(operation, CommStage::Wait, *bytes, start);
        let state = if received.is_ok() {
            EntryState::Done
        } else {
            EntryState::Failed
        };
        self.entry.settle(state);
        received.map(self.finish)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.entry.operation)
    }
}

/// A pending operation's line in its rank's ledger.
pub(crate) struct Entry {
    rank: Arc<RankState>,
    operation: Operation,
    bytes: usize,
    number: u64,
    state: EntryState,
}

impl Entry {
    /// Writes the line.
    pub(crate) fn new(rank: Arc<RankState>, operation: Operation, bytes: usize) -> Self {
        let number = lock(&rank.ledger).record(operation.clone(), bytes);
        Self {
            rank,
            operation,
            bytes,
            number,
            state: EntryState::Discarded,
        }
    }

    /// The operation could not be started.
    pub(crate) fn fail(&mut self) {
        self.settle(EntryState::Failed);
    }

    /// Sets what the line will say.
    fn settle(&mut self, state: EntryState) {
        self.state = state;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.rank.ledger).settle(self.number, self.state);
    }
}
