//! Operations that have started.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::agreement::{AlteredPart, Checks, Difference, Held, Replicas};
use crate::checksum::{Checksums, checksum};
use crate::control::Control;
use crate::control::Wait;
use crate::engine::{Awaited, Claim, Flight, Received, Withdrawn};
use crate::identity::GroupId;
use crate::ledger::EntryState;
use crate::lock::lock;
use crate::rank_state::RankState;
use crate::{Buffer, Carried, CommStage, Error, Moment, Operation, OperationKind, Seal, Stage};

/// An operation that this rank has started and not yet waited for. It owns the operation's sources and buffers.
///
/// With the `local` engine the transfer itself runs inside [`wait`](Self::wait), on the calling thread. Starting early
/// lets peers finish early, but does not move bytes in the background. Pending operations can be waited for in any
/// order. A wait depends only on every rank of the group *starting* the operation.
///
/// Dropping it unfinished discards it. This rank's part is then complete, the peers get their results as if this rank
/// had waited, and its buffers go back to their pool.
#[must_use = "dropping an operation discards it: wait for it"]
pub struct Pending<T = Received> {
    peers: Peers,
    flight: Box<dyn Flight>,
    entry: Entry,
    finish: fn(Received) -> T,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        peers: Peers,
        flight: Box<dyn Flight>,
        entry: Entry,
        finish: fn(Received) -> T,
    ) -> Self {
        Self {
            peers,
            flight,
            entry,
            finish,
        }
    }

    /// Returns the same operation with another view of its result.
    pub(crate) fn map<U>(self, finish: fn(Received) -> U) -> Pending<U> {
        Pending {
            peers: self.peers,
            flight: self.flight,
            entry: self.entry,
            finish,
        }
    }

    /// Returns the identity of the operation.
    pub fn operation(&self) -> &Operation {
        &self.entry.operation
    }

    /// Waits until this rank's result is there. Peers may still be reading this rank's sources.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`], [`Error::PeerFailed`], [`Error::PeerLeft`] or [`Error::Timeout`], at the latest a tenth
    /// after the group's deadline plus the transfer itself.
    pub fn wait(mut self) -> Result<T, Error> {
        let start = Instant::now();
        let received = self.receive();
        self.settle(received, start)
    }

    /// Waits until this rank's result is there, all peers have finished or discarded the operation, and its references
    /// to the sources are dropped. If it held the last references, their memory is then free.
    ///
    /// Peers finish when *they* wait. If several operations are pending, all ranks must therefore wait for them in the
    /// same order.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); the deadline applies to each half.
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
        self.flight.is_there(Awaited::Claims) || self.peers.control.failure().is_some()
    }

    /// Drops the operation explicitly: this rank does not want the result.
    pub fn discard(self) {}

    /// Waits for the claims of all ranks, checks that they agree, and receives, for any engine.
    fn receive(&mut self) -> Result<Received, Error> {
        self.until(Awaited::Claims)?;
        self.compare()?;
        self.peers.control.check(&self.entry.operation)?;
        let begun = self.flight.begin();
        self.there(begun)?;
        self.until(Awaited::Result)?;
        let buffers: Result<Vec<Buffer>, _> = self.flight.receive();
        let buffers = self.there(buffers)?;
        let seals = self.verify(&buffers)?;
        let notes =
            (0..self.peers.id.members().len()).map(|rank| self.flight.claim(rank).note.clone());
        Ok(Received {
            buffers,
            notes: notes.collect(),
            seals,
        })
    }

    fn until(&self, awaited: Awaited) -> Result<(), Error> {
        let members = self.peers.id.members();
        let world_rank = |rank: usize| members[rank];
        let missing = || self.flight.missing(awaited).into_iter().map(world_rank);
        self.peers.control.wait(&Wait {
            is_over: &|| self.flight.is_there(awaited),
            missing: &|| missing().collect(),
            stage: match awaited {
                Awaited::Claims => Stage::Start,
                Awaited::Result | Awaited::Release => Stage::Finish,
            },
            rank: self.peers.world_rank,
            operation: &self.entry.operation,
        })
    }

    /// Compares the claims of all ranks with the first one. Every rank compares the same claims, so all find the same
    /// difference.
    fn compare(&self) -> Result<(), Error> {
        let first = &self.flight.claim(0).signature;
        let difference = (1..self.peers.id.members().len()).find_map(|rank| {
            let difference = first.difference(&self.flight.claim(rank).signature);
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

    /// Compares the received bytes with the checksums that the other ranks have announced, if ranks compare bytes, and
    /// seals them.
    fn verify(&mut self, buffers: &[Buffer]) -> Result<Vec<Seal>, Error> {
        let Some(replicas) = &self.peers.replicas else {
            return Ok(Vec::new());
        };
        let findings = self.flight.findings();
        let own = self.peers.rank;
        let size = self.peers.id.members().len();
        let Claim {
            signature, checks, ..
        } = self.flight.claim(own);
        self.tell_watcher(checks, buffers);
        let misplaced = |from: usize| {
            let checks = &self.flight.claim(from).checks;
            checks.first_misplaced(signature, (from, own), buffers)
        };
        let altered = match signature.reduction {
            None if !findings.has_compared_placed => (0..size).find_map(misplaced),
            _ => findings.altered,
        };
        if let Some(altered) = altered {
            return Err(self.altered(altered));
        }
        let checksums = match findings.results.len() == buffers.len() {
            true => findings.results,
            false => self.checksums(buffers),
        };
        let mut replicas = lock(replicas);
        if signature.kind == OperationKind::AllReduce && !buffers.is_empty() {
            replicas.hold(&self.entry.operation, size, &checksums);
        }
        let difference = |from: usize| {
            let told = &self.flight.claim(from).checks.results;
            replicas.hear(from, size, told)
        };
        match (0..size).map(difference).fold(None, Option::or) {
            None => Ok(self.entry.rank.seals(checksums)),
            Some(difference) => Err(self.disagreement(difference)),
        }
    }

    /// Returns the checksums of each buffer. For concatenated and compared bytes they come from the announced
    /// checksums.
    fn checksums(&self, buffers: &[Buffer]) -> Vec<Checksums> {
        let own = self.peers.rank;
        let signature = &self.flight.claim(own).signature;
        let routes = |from| signature.routes(from, own);
        let routes: Vec<_> = (0..self.peers.id.members().len()).map(routes).collect();
        let joined = |part: usize| {
            let told = routes.iter().enumerate().filter_map(|(from, routes)| {
                let len = routes.get(part)?.placed.len();
                Some((&self.flight.claim(from).checks, len))
            });
            Checks::joined(told, (own, buffers.len()), part)
        };
        let checksums = |(part, buffer): (usize, &Buffer)| {
            let joined = signature.reduction.is_none().then(|| joined(part));
            joined
                .flatten()
                .unwrap_or_else(|| Checksums::of(buffer.as_ref()))
        };
        buffers.iter().enumerate().map(checksums).collect()
    }

    /// Passes the checksums of the operation to the watcher, if there is one.
    fn tell_watcher(&self, checks: &Checks, buffers: &[Buffer]) {
        let Entry {
            rank, operation, ..
        } = &self.entry;
        if let Some(watcher) = &mut *lock(&rank.watcher) {
            let got = buffers.iter().map(|buffer| checksum(buffer.as_ref()));
            watcher.tell(Carried {
                operation: operation.clone(),
                step: rank.step(),
                given: checks.given.clone(),
                got: got.collect(),
            });
        }
    }

    fn altered(&self, altered: AlteredPart) -> Error {
        let AlteredPart {
            from,
            part,
            at_rest,
        } = altered;
        let Peers {
            id,
            world_rank,
            control,
            ..
        } = &self.peers;
        let (peer, ledger) = (id.members()[from], control.report());
        let error = match at_rest.as_deref() {
            Some((seal, what)) => Error::AlteredAtRest {
                what: what.as_str().to_owned(),
                rank: peer,
                written: Box::new(seal.written.clone()),
                found: Box::new(Moment {
                    step: self.entry.rank.step(),
                    after: Some(self.entry.operation.clone()),
                }),
                ledger,
            },
            None => Error::Altered {
                operation: Box::new(self.entry.operation.clone()),
                step: self.entry.rank.step(),
                rank: *world_rank,
                peer,
                part,
                ledger,
            },
        };
        control.end_with(*world_rank, error)
    }

    fn disagreement(&self, difference: Difference) -> Error {
        let Peers {
            id,
            world_rank,
            control,
            ..
        } = &self.peers;
        let ranks = difference.ranks.into_iter();
        let ranks = ranks.map(|rank| id.members()[rank]).collect();
        let (step, ledger) = (self.entry.rank.step(), control.report());
        let error = match difference.held {
            Some(Held::Value(what)) => Error::Diverged {
                what: what.as_str().to_owned(),
                step,
                ranks,
                ledger,
            },
            held => Error::Disagreement {
                operation: Box::new(match held {
                    Some(Held::Result(operation)) => operation,
                    _ => self.entry.operation.clone(),
                }),
                step,
                ranks,
                ledger,
            },
        };
        control.end_with(*world_rank, error)
    }

    /// Turns a withdrawal into the failure of the domain. Published sources stay until all ranks have read them, unless
    /// the domain has failed.
    fn there<U>(&self, read: Result<U, Withdrawn>) -> Result<U, Error> {
        read.or_else(|Withdrawn| {
            let operation = &self.entry.operation;
            self.peers.control.check(operation)?;
            unreachable!("a source of {operation} was withdrawn while it was being read")
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
    /// This rank in the group, and in the world.
    pub(crate) rank: usize,
    pub(crate) world_rank: usize,
    pub(crate) control: Arc<Control>,
    /// The results that must be the same on all ranks, if ranks compare bytes.
    pub(crate) replicas: Option<Arc<Mutex<Replicas>>>,
    /// The end of the group, kept so that its engine lives as long as an operation on it is in progress.
    pub(crate) _end: Arc<dyn Any + Send + Sync>,
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
    /// Adds the entry.
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

    /// Marks the operation as not started because of an error.
    pub(crate) fn fail(&mut self) {
        self.settle(EntryState::Failed);
    }

    /// Sets the entry's next state.
    fn settle(&mut self, state: EntryState) {
        self.state = state;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.rank.ledger).settle(self.number, self.state);
    }
}
