//! The seam between a group's operations and the movement of bytes.

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

/// A rank's end of a group, on some transport.
///
/// An engine moves bytes. [`Call`](crate::call::Call) is responsible for the validity of a rank's own arguments. The
/// group and its [`Control`] are responsible for deadlines, the comparison of claims, failures and ledgers. An engine
/// must ring the bell of the control's world after each change that may end a wait. It must carry
/// [`News`](crate::world::News) if the ranks are in several processes. It must read a rank's sources and fill its
/// buffers only as the operation's [contract](crate::operation::OperationKind::contract) specifies.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Returns the user-visible name of the engine.
    fn name(&self) -> &'static str;

    /// Returns the failure domain of the group.
    fn control(&self) -> &Arc<Control>;

    /// Starts an operation. Returns without waiting for the peers.
    ///
    /// Called once per sequence number, in order.
    fn start(&self, request: Request) -> Box<dyn Flight>;

    /// Creates the described smaller group. Called by all its members and no one else.
    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine>;

    /// Returns true if bytes move while the rank computes, and not only while it waits.
    fn overlaps(&self) -> bool {
        false
    }

    /// Returns true if receivers, including the rank itself, read a rank's data directly from its source.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// Returns true if the other ranks exist.
    fn has_peers(&self) -> bool {
        true
    }
}

/// One rank's request in an operation.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) claim: Claim,
    /// The bytes that this rank contributes, one source per part.
    pub(crate) sources: Vec<Source>,
    /// The buffers for this rank's results: one per part, or none if it does not receive.
    pub(crate) into: Vec<Buffer>,
}

/// A rank's claim on an operation, and the data that it sends to all others with the claim.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    /// The requested operation, on which all ranks must agree.
    pub(crate) signature: Signature,
    /// The bytes that this rank sends to all others.
    pub(crate) note: Vec<u8>,
    /// The checksums that this rank sends to all others.
    pub(crate) checks: Checks,
}

/// The description of a group to be created from a larger one.
#[derive(Debug)]
pub(crate) struct Subgroup {
    /// The group's number in the world, which its members have agreed on; no other group has it.
    pub(crate) number: u64,
    /// The members' ranks in the larger group, in the order of their new ranks.
    pub(crate) members: Vec<usize>,
    /// The index of this rank among the members.
    pub(crate) rank: usize,
    /// The deadline of a group that is its own failure domain; the domain has the group's number.
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

/// A rank's part in an operation that has started. Dropping it completes that part without receiving; the peers still
/// get their results.
pub(crate) trait Flight: Send {
    /// Returns true if the event has happened. Never waits and must be cheap, because it is called in a loop.
    fn is_there(&self, awaited: Awaited) -> bool;

    /// Returns the ranks of the group that have yet to do their part for the event.
    fn missing(&self, awaited: Awaited) -> Vec<usize>;

    /// Returns the claim of a rank of the group. Called when all claims are there.
    fn claim(&self, rank: usize) -> &Claim;

    /// Does the work that this rank must do before its result can be there. Called once, when all claims are there and
    /// agree.
    ///
    /// # Errors
    ///
    /// [`Withdrawn`], which only a failure of the domain can cause.
    fn begin(&mut self) -> Result<(), Withdrawn> {
        Ok(())
    }

    /// Returns the request's buffers, filled. Called once, when the result is there. This rank's part is complete
    /// afterwards.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn>;

    /// Returns the engine's findings about the bytes that it has moved. Called after [`receive`](Self::receive), if
    /// ranks compare bytes.
    fn findings(&mut self) -> Findings;
}

/// An engine's findings about the bytes that it moved. The engine itself has already compared combined bytes.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// True if the engine has also compared moved bytes; otherwise the group compares them.
    pub(crate) has_compared_placed: bool,
    /// The first part that did not match the [checks](Claim::checks) of its rank.
    pub(crate) altered: Option<AlteredPart>,
    /// The checksums of each buffer; empty if the engine did not read them.
    pub(crate) results: Vec<Checksums>,
}

/// Withdraws a rank's sources after its failure domain has ended.
#[derive(Debug)]
pub(crate) struct Withdrawn;

/// The result of an operation on one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received {
    /// The request's buffers, filled; empty on ranks that do not receive.
    pub buffers: Vec<Buffer>,
    /// The note of every rank, by rank of the group.
    pub notes: Vec<Vec<u8>>,
    /// The seal of each buffer, if ranks compare bytes; otherwise empty.
    pub seals: Vec<Seal>,
}
