//! Operations that have started, and the wait for their results.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::checked::Checked;
use super::received::Received;
use super::started::{Started, Wanted};
use burn_fsdp_rendezvous::{
    CommStage, Control, EntryState, Error, GroupId, Operation, RankState, Stage, Wait,
};
use burn_fsdp_transport::{Awaited, Completion, Stopped};

/// An operation that this rank has started but not yet waited for. It owns the operation's sources and buffers.
///
/// With the `local` engine the transfer itself runs inside [`wait`](Self::wait), on the calling thread. Starting early
/// lets peers finish early, but does not move bytes in the background. Pending operations can be waited for in any
/// order. A wait depends only on every rank of the group *starting* the operation.
///
/// Dropping it without waiting discards the operation. This rank's part is then complete, the peers get their results
/// as if this rank had waited, and its buffers return to their pool.
#[must_use = "dropping an operation discards it: wait for it"]
pub struct Pending<T = Received> {
    peers: Peers,
    started: Started,
    wanted: Wanted,
    entry: Entry,
    finish: fn(Received) -> T,
}

impl<T> Pending<T> {
    pub(super) fn new(
        peers: Peers,
        (started, wanted): (Started, Wanted),
        entry: Entry,
        finish: fn(Received) -> T,
    ) -> Self {
        Self {
            peers,
            started,
            wanted,
            entry,
            finish,
        }
    }

    /// Returns the same operation with a conversion of its result.
    pub(crate) fn map<U>(self, finish: fn(Received) -> U) -> Pending<U> {
        Pending {
            peers: self.peers,
            started: self.started,
            wanted: self.wanted,
            entry: self.entry,
            finish,
        }
    }

    /// Returns the identity of the operation.
    pub fn operation(&self) -> &Operation {
        &self.entry.operation
    }

    /// Waits until this rank's result is available. Peers may still be reading this rank's sources.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`], [`Error::PeerFailed`], [`Error::PeerLeft`] or [`Error::Timeout`]; [`Error::Engine`] for a
    /// faulty engine. With [`Check::Agreement`](crate::Check::Agreement), also [`Error::Altered`],
    /// [`Error::AlteredAtRest`], [`Error::Disagreement`] or [`Error::Diverged`]. The rank waits first for all ranks to
    /// start the operation and then for the result, each time for at most 1.1 times the group's deadline.
    pub fn wait(mut self) -> Result<T, Error> {
        let start = Instant::now();
        let received = self.receive();
        self.settle(received, start)
    }

    /// Waits until this rank's result is available, all peers have finished or discarded the operation, and the
    /// operation's references to this rank's sources are dropped. If these were the last references, the memory is then
    /// free.
    ///
    /// Peers finish when *they* wait. If several operations are pending, all ranks must therefore wait for them in the
    /// same order.
    ///
    /// # Errors
    ///
    /// Same as [`wait`](Self::wait); the deadline also applies to the additional wait for the peers.
    pub fn wait_released(mut self) -> Result<T, Error> {
        let start = Instant::now();
        let received = self.receive().and_then(|received| {
            self.until(Awaited::Release)?;
            Ok(received)
        });
        self.settle(received, start)
    }

    /// Returns true if all ranks have started the operation, or it has failed. [`wait`](Self::wait) then does not wait
    /// for ranks that are busy elsewhere.
    pub fn is_ready(&self) -> bool {
        self.started.meeting().is_complete() || self.peers.control.failure().is_some()
    }

    /// Discards the operation: this rank does not need the result.
    pub fn discard(self) {}

    /// Waits for the claims of all ranks, checks that they agree, and receives the result, for any engine.
    fn receive(&mut self) -> Result<Received, Error> {
        self.meet()?;
        self.compare()?;
        self.peers.control.check(&self.entry.operation)?;
        let begun = self.started.begin();
        self.there(begun)?;
        self.until(Awaited::Result)?;
        let completion = self.started.receive();
        let completion = self.there(completion)?;
        if let Some((expected, got)) = self.wanted.difference(&completion) {
            return Err(self.engine_error(expected, got));
        }
        let (buffers, fence) = match completion {
            Completion::Done(buffers) => (buffers, None),
            Completion::Enqueued { buffers, fence } => (buffers, Some(fence)),
        };
        let seals = match &self.peers.checked {
            Some(checked) => {
                let findings = self.started.findings();
                let meeting = self.started.meeting();
                checked.compare((&self.entry.operation, meeting), findings, &buffers)?
            }
            None => Vec::new(),
        };
        let meeting = self.started.meeting();
        let notes = (0..self.peers.id.members().len()).map(|rank| meeting.claim(rank).note.clone());
        Ok(Received {
            buffers,
            notes: notes.collect(),
            seals,
            fence,
        })
    }

    /// Waits for the claims of all ranks.
    fn meet(&self) -> Result<(), Error> {
        let meeting = self.started.meeting();
        self.wait_for(Stage::Start, &|| meeting.is_complete(), &|| {
            meeting.absent()
        })
    }

    fn until(&self, awaited: Awaited) -> Result<(), Error> {
        let is_over = || self.started.is_there(awaited);
        self.wait_for(Stage::Finish, &is_over, &|| self.started.missing(awaited))
    }

    fn wait_for(
        &self,
        stage: Stage,
        is_over: &dyn Fn() -> bool,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<(), Error> {
        let members = self.peers.id.members();
        let world_ranks = |ranks: Vec<usize>| ranks.into_iter().map(|rank| members[rank]);
        self.peers.control.wait(&Wait {
            is_over,
            missing: &|| world_ranks(missing()).collect(),
            stage,
            rank: self.peers.world_rank,
            operation: &self.entry.operation,
        })
    }

    /// Ends the domain because the engine has broken its contract.
    fn engine_error(&self, expected: String, got: String) -> Error {
        let error = Error::Engine {
            rank: self.peers.world_rank,
            engine: self.peers.engine,
            operation: Box::new(self.entry.operation.clone()),
            expected,
            got,
        };
        self.peers.control.end_with(self.peers.world_rank, error)
    }

    /// Compares the claims of all ranks with the first one. Every rank compares the same claims, so all find the same
    /// difference.
    fn compare(&self) -> Result<(), Error> {
        let first = &self.started.meeting().claim(0).signature;
        let difference = (1..self.peers.id.members().len()).find_map(|rank| {
            let difference = first.difference(&self.started.meeting().claim(rank).signature);
            difference.map(|(expected, got)| (rank, expected, got))
        });
        let Some((peer, expected, got)) = difference else {
            return Ok(());
        };
        let (control, members) = (&self.peers.control, self.peers.id.members());
        let error = Error::Mismatch {
            operation: Box::new(self.entry.operation.clone()),
            rank: members[0],
            expected,
            peer: members[peer],
            got,
            ledger: control.report(),
        };
        Err(control.end_with(self.peers.world_rank, error))
    }

    /// Turns a flight without result into the failure of the domain. Published sources stay until all ranks have read
    /// them, unless the domain has failed.
    fn there<U>(&self, read: Result<U, Stopped>) -> Result<U, Error> {
        read.or_else(|stopped| {
            self.peers.control.check(&self.entry.operation)?;
            let (expected, got) = match stopped {
                Stopped::Withdrawn => (
                    "the bytes of every rank until all have read them",
                    "a withdrawal before any rank has failed".to_owned(),
                ),
                Stopped::Failed(reason) => ("bytes that it can move", reason),
            };
            Err(self.engine_error(expected.to_owned(), got))
        })
    }

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

/// This rank's view of an operation's group.
pub(crate) struct Peers {
    pub(crate) id: GroupId,
    /// This rank's number in the world.
    pub(crate) world_rank: usize,
    /// The name of the engine.
    pub(crate) engine: &'static str,
    pub(crate) control: Arc<Control>,
    /// The comparison of bytes, if ranks compare them.
    pub(crate) checked: Option<Arc<Checked>>,
    /// Keeps the group's engine alive while an operation is in progress.
    pub(crate) _handle: Arc<dyn Any + Send + Sync>,
}

/// A pending operation's entry in its rank's ledger.
pub(crate) struct Entry {
    rank: Arc<RankState>,
    operation: Operation,
    bytes: usize,
    number: u64,
    state: EntryState,
}

impl Entry {
    /// Records a started operation in the rank's ledger.
    pub(crate) fn new(rank: Arc<RankState>, operation: Operation, bytes: usize) -> Self {
        let number = rank.record(operation.clone(), bytes);
        Self {
            rank,
            operation,
            bytes,
            number,
            state: EntryState::Discarded,
        }
    }

    /// Marks the operation as failed, because it could not start.
    pub(crate) fn fail(&mut self) {
        self.settle(EntryState::Failed);
    }

    /// Sets the state to record when the entry is dropped.
    fn settle(&mut self, state: EntryState) {
        self.state = state;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.rank.settle(self.number, self.state);
    }
}
