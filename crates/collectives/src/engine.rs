//! The seam between what a group offers and what moves the bytes.

use std::fmt;

use crate::operation::Signature;
use crate::{Buffer, Error, Operation, Source};

/// One rank's end of a group, on some transport.
///
/// That a rank's own arguments are right is the responsibility of the caller, [`Call`](crate::call::Call).
/// The engine finds out what only the ranks together can know: that they differ, that one failed, that
/// one does not come.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Begins an operation. Returns without waiting for the peers.
    ///
    /// Called once per sequence number, in order.
    fn start(&self, request: Request) -> Result<Box<dyn Flight>, Error>;

    /// Makes the smaller group described; called by all its members and no one else.
    fn subgroup(&self, subgroup: Subgroup) -> Box<dyn Engine>;

    /// Whether the other ranks exist.
    fn has_peers(&self) -> bool {
        true
    }
}

/// One rank's part in an operation.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    /// What all ranks must agree on.
    pub(crate) signature: Signature,
    /// What this rank tells all others.
    pub(crate) note: Vec<u8>,
    /// What this rank contributes, one per part.
    pub(crate) sources: Vec<Source>,
    /// Where this rank's results go: one per part, or none if it does not receive.
    pub(crate) into: Vec<Buffer>,
}

/// A group to be made out of a larger one.
#[derive(Debug)]
pub(crate) struct Subgroup {
    /// Tells apart the groups made at once.
    pub(crate) color: usize,
    /// The sequence number of the operation in which the members agreed.
    pub(crate) sequence: u64,
    /// The members by their rank in the larger group, in the order of their new ranks.
    pub(crate) members: Vec<usize>,
    /// Which of them this rank is.
    pub(crate) rank: usize,
}

/// One rank's part in an operation that has started. Dropping it completes that part without
/// receiving: the peers still get theirs.
pub(crate) trait Flight: Send {
    /// Waits until this rank's result is there. Called at most once.
    fn wait(&mut self) -> Result<Received, Error>;

    /// Waits until the peers have read this rank's sources and those are dropped. Called at most
    /// once, after `wait` succeeded.
    fn wait_released(&mut self) -> Result<(), Error>;
}

/// What an operation gives a rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received {
    /// The buffers handed in, filled; empty on ranks that do not receive.
    pub buffers: Vec<Buffer>,
    /// What every rank told, by rank of the group.
    pub notes: Vec<Vec<u8>>,
}
