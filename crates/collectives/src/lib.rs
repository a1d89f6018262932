//! Process groups and collective operations of burn-fsdp.
//!
//! - [`launch()`] starts ranks as threads of this process, or uses the processes that an MPI launcher has started. Each
//!   rank gets its [`ProcessGroup`] of the world.
//! - A [`ProcessGroup`] offers the collective operations, either blocking or as [`Pending`] handles. It can be
//!   [`split`](ProcessGroup::split) into smaller groups. A [`ProcessMesh`] has one group per mesh axis.
//! - Operations read [`Source`]s and fill [`Buffer`]s of the rank's [`BufferPool`]. They accept lists of [`Part`]s, so
//!   one operation can carry many tensors.
//! - [`ProcessGroup::fake`] simulates one rank of many on a single thread, and a [`CommCounter`] counts its operations.
//!   Both are for tests of programs that communicate.
//! - Reductions add in rank order: the bits of a result depend only on the values and on the size of the group.
//! - If a rank fails, calls something else or does not arrive, the operations of all other ranks return an [`Error`].
//!   It reports which rank failed, where and why, and lists the last operations of the ranks in the same process, from
//!   their [`Ledger`]s.
//!   Nothing hangs, and no wrong result is returned. With [`Check::Agreement`] this also holds for bytes that faulty
//!   memory or a faulty link has changed.
//!
//! - An [`Engine`](engine::Engine) moves the bytes. Programs can run a group on a custom engine
//!   ([`ProcessGroup::on_engine`]), even for bytes that are not in host memory.
//!
//! The crate deals with bytes, element types and ranks. It does not depend on Burn, parameters or models.
//!
//! ```
//! use burn_fsdp_collectives::{
//!     ElementType, Error, LaunchConfig, Part, Partition, ProcessGroup, Source, launch,
//! };
//!
//! // Three elements on two ranks: rank 0 holds two of them, rank 1 the last.
//! fn body(world: ProcessGroup) -> Result<Vec<u8>, Error> {
//!     let partition = Partition::flat(3, world.size())?;
//!     let shard: Vec<u8> = partition.range(world.rank()).map(|i| 10 * i as u8).collect();
//!     let part = Part::new(Source::new(shard), partition, ElementType::U8);
//!     let full = world.pool().take(3);
//!     let received = world.all_gather("example", Vec::new(), vec![part], vec![full])?;
//!     Ok(received.buffers[0].as_ref().to_vec())
//! }
//!
//! let results = launch(LaunchConfig::new(2), body)?;
//! assert_eq!(results, [[0, 10, 20], [0, 10, 20]]);
//! # Ok::<(), burn_fsdp_collectives::LaunchError>(())
//! ```
//!
//! With the feature `mpi`, `engines/mpi/wire.rs` calls MPI, a C library, and `engines/mpi/landing.rs` has the memory
//! that MPI fills. Nothing else is unsafe.
#![cfg_attr(not(feature = "mpi"), forbid(unsafe_code))]

mod engines;
mod group;
mod launch;

pub use burn_fsdp_mesh::{Mesh, Partition, ReduceOp};
pub use burn_fsdp_rendezvous::{
    At, Carried, Check, CommSpan, CommStage, Contract, ElementType, EntryState, Error, Fault,
    Fingerprint, GroupId, How, Label, Ledger, LedgerEntry, LedgerReport, Moment, Operation,
    OperationCounts, OperationKind, Reduction, RestKind, Role, Seal, Sealed, Share, Stage, Tally,
    VaultSlot, Who,
};
pub use burn_fsdp_transport::{Account, Buffer, BufferPool, Source};
pub use group::{
    AsMesh, CommCounter, CrossPart, FullPart, Keeper, Part, Pending, ProcessGroup, ProcessMesh,
    Received,
};
pub use launch::{
    LaunchConfig, LaunchError, Processes, Unwound, launch, launcher_ranks, processes, thread_ranks,
};

/// The items needed to write an engine.
///
/// `src/README.md` explains how to add one.
pub mod engine {
    pub use burn_fsdp_rendezvous::{
        Checks, Checksums, Claim, Control, Extent, Failure, Meeting, Messages, Route, Signature,
        Subgroup, checksum,
    };
    pub use burn_fsdp_transport::{
        AlteredPart, Awaited, Completion, DeviceMemory, Engine, Fence, Findings, Flight, Payload,
        Request, Space, Stopped, Stretch, copy, reduce,
    };
}
