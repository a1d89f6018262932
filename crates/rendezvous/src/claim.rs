//! The messages that the ranks of a group send each other before bytes move.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::agreement::Checks;
use super::control::Control;
use super::operation::{Operation, Signature};

/// A rank's claim on an operation, and the data that it sends to all others with the claim.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The requested operation, which all ranks must agree on.
    pub signature: Signature,
    /// The bytes that this rank sends to all others.
    pub note: Vec<u8>,
    /// The checksums that this rank sends to all others.
    pub checks: Checks,
}

/// The description of a group to be split from a larger one.
#[derive(Debug, Clone)]
pub struct Subgroup {
    /// The group's number in the world, which its members have agreed on; no other group has it.
    pub number: u64,
    /// The members by their rank in the larger group, in the order of their new ranks.
    pub members: Vec<usize>,
    /// The index of this rank among the members.
    pub rank: usize,
    /// The group's deadline if it is a separate failure domain, whose number is the group's; `None` otherwise.
    pub isolated: Option<Duration>,
}

/// Sends a rank's claims to the other ranks of a group. Claims are in host memory, wherever the tensors are.
///
/// An implementation must [ring](Control::ring) after each change that may end a wait. It must also carry
/// [`News`](super::News) if the ranks are in several processes.
pub trait Messages: fmt::Debug + Send + Sync {
    /// Returns the failure domain of the group.
    fn control(&self) -> &Arc<Control>;

    /// Sends this rank's claim on an operation that moves no other data. Returns without waiting for the peers.
    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting>;
}

/// The claims of all ranks on one operation, as they arrive. Dropping it does not prevent the peers from meeting.
pub trait Meeting: Send + Sync {
    /// Returns true if the claims of all ranks have arrived. Never waits and must be cheap, because it is called in a
    /// loop.
    fn is_complete(&self) -> bool;

    /// Returns the ranks of the group whose claims are missing.
    fn absent(&self) -> Vec<usize>;

    /// Returns the claim of a rank of the group. Called when all claims have arrived.
    fn claim(&self, rank: usize) -> &Claim;
}
