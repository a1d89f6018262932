//! The interface between a group's operations and the movement of bytes.

use std::sync::Arc;

use super::payload::{Fence, Space};
use super::pool::Buffer;
use super::source::Source;
use burn_fsdp_rendezvous::{Checksums, Claim, Meeting, Messages, Operation, Subgroup};

/// A rank's handle to a group, on some transport.
///
/// An engine moves bytes. The group checks a rank's own arguments, compares the claims of all ranks, and handles
/// deadlines, failures and ledgers through the engine's [`Control`](burn_fsdp_rendezvous::Control). An engine must read
/// a rank's sources and fill its buffers only as the operation's
/// [contract](burn_fsdp_rendezvous::OperationKind::contract) specifies, along the
/// [routes](burn_fsdp_rendezvous::Signature::routes) that follow from it.
///
/// The group calls [`post`](Messages::post) for operations that carry only claims and notes, and [`start`](Self::start)
/// for all others. Each operation number is used once, in order.
pub trait Engine: Messages {
    /// Returns the user-visible name of the engine.
    fn name(&self) -> &'static str;

    /// Starts an operation. Returns without waiting for the peers.
    fn start(&self, request: Request) -> Box<dyn Flight>;

    /// Creates the smaller group that `subgroup` describes. All its members call this, and no other rank does.
    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine>;

    /// Returns true if sources and buffers may be in this memory. All non-empty ones of an operation are in the same
    /// memory.
    fn takes(&self, space: Space) -> bool {
        space == Space::Host
    }

    /// Returns true if sources may also be [shared](crate::Payload::is_shared) payloads, and buffers in a
    /// [`DeviceMemory`](crate::DeviceMemory).
    fn shares_devices(&self) -> bool {
        false
    }

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

/// A rank's request to take part in an operation.
#[derive(Debug)]
pub struct Request {
    /// The identity of the operation. Its number is the same on all ranks.
    pub operation: Operation,
    /// The claim to be sent to all others.
    pub claim: Claim,
    /// The bytes that this rank contributes, one source per part.
    pub sources: Vec<Source>,
    /// The buffers for this rank's results: one per part, or none if it does not receive.
    pub into: Vec<Buffer>,
}

/// An event that a rank waits for after all claims on an operation have arrived. The events happen in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// The bytes for this rank have arrived, or the work that produces them is in the queue of a device.
    Result,
    /// This rank's sources are no longer used: no peer reads them any more, and the engine has dropped them.
    Release,
}

/// A rank's part in an operation that has started. Dropping it completes that part without receiving; the peers still
/// get their results.
pub trait Flight: Send {
    /// Returns the claims of all ranks.
    fn meeting(&self) -> &dyn Meeting;

    /// Returns true if the event has happened. Never waits and must be cheap, because it is called in a loop.
    fn is_there(&self, awaited: Awaited) -> bool;

    /// Returns the ranks of the group that have yet to do their part for the event.
    fn missing(&self, awaited: Awaited) -> Vec<usize>;

    /// Does the work that this rank must do before its result can be available. Called once, when all claims have
    /// arrived and agree.
    ///
    /// # Errors
    ///
    /// [`Stopped`].
    fn begin(&mut self) -> Result<(), Stopped> {
        Ok(())
    }

    /// Returns the result. Called once, when it is available. This rank's part is complete afterwards.
    ///
    /// # Errors
    ///
    /// Same as [`begin`](Self::begin).
    fn receive(&mut self) -> Result<Completion, Stopped>;

    /// Returns the engine's findings about the bytes that it has moved. Called after [`receive`](Self::receive) if the
    /// ranks compare bytes.
    fn findings(&mut self) -> Findings {
        Findings::default()
    }
}

/// The result of a flight: the request's buffers. The engine fills the ones in host memory, and replaces the others
/// with the [arrived](Buffer::arrived) bytes.
#[derive(Debug)]
pub enum Completion {
    /// The buffers are filled.
    Done(Vec<Buffer>),
    /// The work that fills the buffers is enqueued on their device. The host does not wait for it.
    Enqueued {
        /// The buffers, none of them in host memory.
        buffers: Vec<Buffer>,
        /// The end of the enqueued work. Later work that reads the buffers must wait for it on the device.
        fence: Arc<dyn Fence>,
    },
}

/// An engine's findings about the bytes that it has moved. An engine compares the bytes that it combines with the
/// sender's [checksums](burn_fsdp_rendezvous::Checks::first_altered), since nothing else sees them.
#[derive(Debug, Default)]
pub struct Findings {
    /// True if the engine has also compared moved bytes; otherwise the group compares them.
    pub has_compared_placed: bool,
    /// The first part that did not match the checksums announced by its sender.
    pub altered: Option<AlteredPart>,
    /// The checksums of each buffer; empty if the engine did not read them.
    pub results: Vec<Checksums>,
}

/// A part whose bytes differ from the bytes that a rank sent.
#[derive(Debug, Clone)]
pub struct AlteredPart {
    /// The sender's rank in the group.
    pub from: usize,
    /// The index of the part.
    pub part: usize,
    /// The sender's source, if the engine read the bytes there. It may have changed before it was read.
    pub source: Option<Source>,
}

impl AlteredPart {
    /// Reports a part that changed after it was sent.
    pub fn on_its_way(from: usize, part: usize) -> Self {
        Self {
            from,
            part,
            source: None,
        }
    }
}

/// The reason why a flight has no result.
#[derive(Debug)]
pub enum Stopped {
    /// A rank has withdrawn its sources, which happens when its failure domain has ended.
    Withdrawn,
    /// The engine cannot move these bytes, for the described reason. The failure domain ends.
    Failed(String),
}
