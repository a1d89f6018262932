//! Process groups and collective operations of burn-fsdp.
//!
//! - [`launch()`] starts ranks as threads of this process, or uses the processes that an MPI launcher has started. Each
//!   rank gets its end of the world's [`ProcessGroup`].
//! - A [`ProcessGroup`] offers the collective operations, either blocking or as [`Pending`] handles. It can be
//!   [`split`](ProcessGroup::split) into smaller groups. A [`ProcessMesh`] has one group per mesh axis.
//! - Operations read [`Source`]s and fill [`Buffer`]s of the rank's [`BufferPool`]. They take lists of [`Part`]s, so
//!   one operation can carry many tensors.
//! - [`ProcessGroup::fake`] is one rank of many on a single thread, and a [`CommCounter`] counts its operations. Both
//!   are for tests of programs that communicate.
//! - Reductions add in rank order: the bits of a result depend only on the values and on the size of the group.
//! - If a rank fails, calls something else or does not arrive, the operations of all other ranks return an [`Error`].
//!   It tells which rank failed, where and why, and lists the last operations of every rank from their [`Ledger`]s.
//!   Nothing hangs, and no wrong number is returned. With [`Check::Agreement`] this also holds for bytes that faulty
//!   memory or a faulty link has changed.
//!
//! The crate deals with bytes, element types and ranks. It knows nothing about Burn, parameters or models.
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
// MPI is a C library, called by `mpi/wire.rs` and `mpi/landing.rs`. Nothing else is unsafe.
#![cfg_attr(not(feature = "mpi"), forbid(unsafe_code))]

// The contract tests refer to the crate by the name that its users use.
#[cfg(test)]
extern crate self as burn_fsdp_collectives;

mod agreement;
mod arithmetic;
mod bell;
mod call;
mod carried;
mod checksum;
mod collective;
mod contract;
mod control;
mod counter;
mod counts;
mod element;
mod engine;
mod error;
mod failing;
mod fake;
mod fault;
mod fingerprint;
mod group;
mod identity;
mod label;
mod launch;
mod ledger;
mod local;
mod lock;
#[cfg(feature = "mpi")]
mod mpi;
mod one_rank;
mod operation;
mod part;
mod patience;
mod pending;
mod pool;
mod process_mesh;
mod rank_state;
mod recording;
mod reduction;
mod seal;
mod sealing;
mod source;
mod waits;
mod world;

pub use agreement::Check;
pub use burn_fsdp_mesh::{Mesh, Partition, ReduceOp};
pub use carried::Carried;
pub use contract::{Contract, Role, Share, Who};
pub use counter::CommCounter;
pub use counts::{OperationCounts, Tally};
pub use element::ElementType;
pub use engine::Received;
pub use error::{Error, Stage};
pub use fault::{At, Fault, How};
pub use fingerprint::Fingerprint;
pub use group::ProcessGroup;
pub use identity::GroupId;
pub use label::Label;
pub use launch::{
    LaunchConfig, LaunchError, Processes, Unwound, launch, launcher_ranks, processes, thread_ranks,
};
pub use ledger::{EntryState, Ledger, LedgerEntry, LedgerReport};
pub use operation::{Operation, OperationKind};
pub use part::{CrossPart, FullPart, Part};
pub use pending::Pending;
pub use pool::{Account, Buffer, BufferPool};
pub use process_mesh::{AsMesh, ProcessMesh};
pub use recording::{CommSpan, CommStage};
pub use reduction::Reduction;
pub use seal::{Moment, Seal};
pub use source::Source;
