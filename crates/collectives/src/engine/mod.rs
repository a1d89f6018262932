//! The seam between what a group offers and what moves the bytes.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::agreement::{AlteredPart, Checks};
use crate::checksum::Checksums;
use crate::control::Control;
use crate::operation::Signature;
use crate::{Buffer, Operation, Seal, Source};

/// The end of one rank of a group, on some transport.
///
/// An engine moves bytes. That a rank's own arguments are right is the responsibility of
/// [`Call`](crate::call::Call); deadlines, the comparison of claims, failures and ledgers are that of
/// the group and its [`Control`]. What an engine owes them: it rings the bell of the control's
/// world after each change that may end a wait, it carries [`News`](crate::world::News) where ranks
/// are not all of one process, and it reads a rank's sources and fills its buffers only as the
/// operation's [contract](crate::operation::OperationKind::contract) says.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Returns the name that users know the engine by.
    fn name(&self) -> &'static str;

    /// Returns the failure domain of the group.
    fn control(&self) -> &Arc<Control>;

    /// Begins an operation. Returns without waiting for the peers.
    ///
    /// Called once per sequence number, in order.
    fn start(&self, request: Request) -> Box<dyn Flight>;

    /// Makes the smaller group described; called by all its members and no one else.
    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine>;

    /// Returns true if bytes move while the rank computes, and not in the time that it waits.
    fn overlaps(&self) -> bool {
        false
    }

    /// Returns true if whoever gets what a rank gives, the rank itself among them, reads it in the rank's own source.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// Returns true if the other ranks exist.
    fn has_peers(&self) -> bool {
        true
    }
}

/// The request of one rank for its part in an operation.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) claim: Claim,
    /// The bytes that this rank contributes, one source per part.
    pub(crate) sources: Vec<Source>,
    /// The buffers for this rank's results: one per part, or none if it does not receive.
    pub(crate) into: Vec<Buffer>,
}

/// The claim of a rank on an operation, and what it tells all others with it.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    /// The operation wanted, which all ranks must agree on.
    pub(crate) signature: Signature,
    /// The bytes that this rank tells all others.
    pub(crate) note: Vec<u8>,
    /// The checksums that this rank tells all others.
    pub(crate) checks: Checks,
}

/// A group to be made out of a larger one.
#[derive(Debug)]
pub(crate) struct Subgroup {
    /// The group's number in the world, which its members have agreed on; no other group has it.
    pub(crate) number: u64,
    /// The members by their rank in the larger group, in the order of their new ranks.
    pub(crate) members: Vec<usize>,
    /// The index of this rank among them.
    pub(crate) rank: usize,
    /// The deadline of a group that is a failure domain of its own; the domain has its number.
    pub(crate) isolated: Option<Duration>,
}

/// The events that a rank waits for in an operation, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// The claims of all ranks.
    Claims,
    /// The bytes that this rank receives.
    Result,
    /// The end of all use of this rank's sources: no peer reads them any more, and the engine has dropped them.
    Release,
}

/// The part of one rank in an operation that has started. Dropping it completes that part without
/// receiving: the peers still get theirs.
pub(crate) trait Flight: Send {
    /// Returns true if the event has come about. Never waits, and costs little: it is asked in a loop.
    fn is_there(&self, awaited: Awaited) -> bool;

    /// Returns the ranks of the group that have yet to do their part for it.
    fn missing(&self, awaited: Awaited) -> Vec<usize>;

    /// Returns the claim of a rank of the group. Called when all claims are there.
    fn claim(&self, rank: usize) -> &Claim;

    /// Does what this rank has to do before its result can be there. Called once, when all claims
    /// are there and agree.
    ///
    /// # Errors
    ///
    /// [`Withdrawn`], which only a failure of the domain can be the cause of.
    fn begin(&mut self) -> Result<(), Withdrawn> {
        Ok(())
    }

    /// Returns the request's buffers, filled. Called once, when the result is there; this rank's
    /// part is complete then.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn>;

    /// Returns what the engine has found of the bytes that it has moved. Called after [`receive`](Self::receive), where
    /// ranks compare bytes.
    fn findings(&mut self) -> Findings;
}

/// What an engine has found of the bytes that it has moved. Whatever is combined it has compared.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// True if it has compared what is put side by side, too; otherwise the group does.
    pub(crate) has_compared_placed: bool,
    /// The first part that was not what its rank has told with its [checks](Claim::checks).
    pub(crate) altered: Option<AlteredPart>,
    /// The checksums of each buffer; empty if the engine has not read them.
    pub(crate) results: Vec<Checksums>,
}

/// A rank took its bytes away, as a rank does when its failure domain has ended.
#[derive(Debug)]
pub(crate) struct Withdrawn;

/// The result of an operation on one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received {
    /// The buffers handed in, filled; empty on ranks that do not receive.
    pub buffers: Vec<Buffer>,
    /// The note of every rank, by rank of the group.
    pub notes: Vec<Vec<u8>>,
    /// The seal of each buffer, where ranks compare bytes; otherwise none.
    pub seals: Vec<Seal>,
}
