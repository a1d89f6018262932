//! The result of an operation.

use std::sync::Arc;

use burn_fsdp_rendezvous::Seal;
use burn_fsdp_transport::{Buffer, Fence};

/// The result of an operation on one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received {
    /// The request's buffers, filled; empty on ranks that do not receive.
    pub buffers: Vec<Buffer>,
    /// The note of every rank, by rank of the group.
    pub notes: Vec<Vec<u8>>,
    /// The seal of each buffer if ranks compare bytes; otherwise empty.
    pub seals: Vec<Seal>,
    /// The fence behind the enqueued work that fills the buffers, if they are in device memory. Work on the device that
    /// reads the buffers must wait for it.
    pub fence: Option<Arc<dyn Fence>>,
}
