//! The control plane: how the ranks of a group find each other and agree on each operation.
//!
//! It holds the state of the world and of each rank, the claims and notes of operations, their deadlines, their
//! failures and the ledgers that explain them. All of it is in host memory, and the same for every engine. It does not
//! depend on where tensors are or how they move.

#![forbid(unsafe_code)]

mod agreement;
mod bell;
mod carried;
mod checksum;
mod claim;
mod contract;
mod control;
mod counts;
mod element;
mod error;
#[cfg(feature = "faults")]
mod failing;
mod fault;
mod fingerprint;
mod identity;
mod label;
mod ledger;
#[cfg(not(feature = "faults"))]
mod not_failing;
mod operation;
mod patience;
mod rank_state;
mod recording;
mod reduction;
mod seal;
mod vault;
mod waits;
mod world;

pub use agreement::{Check, Checks, Difference, Held, Replicas};
pub use carried::Carried;
pub use checksum::{Checksums, Reading, checksum};
pub use claim::{Claim, Meeting, Messages, Subgroup};
pub use contract::{Contract, Role, Route, Share, Who};
pub use control::{Control, Failure, WORLD_DOMAIN, Wait};
pub use counts::{OperationCounts, Tally};
pub use element::ElementType;
pub use error::{Error, Stage};
pub use fault::{At, Fault, How};
pub use fingerprint::Fingerprint;
pub use identity::GroupId;
pub use label::Label;
pub use ledger::{EntryState, Ledger, LedgerEntry, LedgerReport};
pub use operation::{Extent, Operation, OperationKind, Signature};
pub use rank_state::RankState;
pub use recording::{CommSpan, CommStage};
pub use reduction::Reduction;
pub use seal::{Moment, Seal, Sealed};
pub use vault::{RestKind, Vault, VaultSlot};
pub use waits::LongWait;
pub use world::{Messenger, News, NobodyElse, World};
