//! Sharded checkpoints: saved by any number of ranks, loaded by any number.
//!
//! | word | meaning |
//! |---|---|
//! | step | a folder with everything that a run needs to continue: `step-000120` |
//! | part | the elements of a tensor that one rank wrote; every element is in exactly one part |
//! | [`Region`] | some elements of a tensor: a flat range, or a box |
//! | [`Layout`] | the distribution of a tensor over a mesh, which determines each rank's region |
//! | [`WritePlan`], [`ReadPlan`] | the parts that each rank writes, and the bytes to read for a region; computed without I/O |
//! | [`Index`] | the contents of each file of a step, with a checksum of every byte |
//! | [`Staging`] | a step that is being written, in the same folder under a hidden name |
//! | commit | the rename that makes a step visible, when all of it is synced |
//!
//! - [`save`] runs a whole save with the other ranks, over any [`Rendezvous`]. [`BackgroundSaver`] does so on a thread
//!   while training continues. [`Staging`] and [`write_shard`] are the separate phases, for ranks that communicate in
//!   another way.
//! - [`Checkpoints`] is a folder of steps. It finds the newest and the newest good step, and removes old ones. A run
//!   [locks](Checkpoints::acquire) it against others.
//! - [`Step`] reads any region of any tensor, regardless of the ranks that saved it.
//! - [`consolidate_to_file`] and [`consolidate_to_folder`] convert a step to plain safetensors; [`Inspection`] shows
//!   the contents of a step.
//!
//! `README.md` next to the code describes the format and the commit protocol, and explains why a commit is atomic.
//!
//! The crate deals with named tensors of bytes. It does not depend on Burn, devices or communication. Files are
//! untrusted: regardless of their contents, the worst outcome is an [`Error`]. No memory is allocated beyond [`Limits`]
//! and the caller's request.
//!
//! ```
//! use std::sync::Arc;
//!
//! use burn_fsdp_checkpoint::{
//!     Alone, Checkpoints, Dtype, Layout, Mesh, Region, SaveRequest, Snapshot, TensorKind, TensorSpec,
//!     TrainingState, WritePlan, save,
//! };
//!
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path();
//! // One rank saves a matrix of 2 x 3 elements ...
//! let mesh = Mesh::line("shard", 1)?;
//! let layout = Layout::flat(&mesh, "shard")?;
//! let weight = TensorSpec::new("weight", [2, 3], Dtype::U8, TensorKind::Parameter, layout);
//! let plan = Arc::new(WritePlan::new(&mesh, vec![weight])?);
//! let training = TrainingState { step: 7, ..TrainingState::default() };
//! let mut snapshot = Snapshot::new();
//! snapshot.insert("weight", Region::whole(&[2, 3]), vec![1, 2, 3, 4, 5, 6]);
//! let checkpoints = Checkpoints::new(dir);
//! save(&checkpoints, &SaveRequest::new(plan, training), &mut snapshot, &mut Alone)?;
//!
//! // ... and the second of two loads its flat shard.
//! let step = checkpoints.newest()?;
//! assert_eq!(step.index().training.step, 7);
//! assert_eq!(step.read("weight", &Region::Flat(3..6))?, [4, 5, 6]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod background;
mod checkpoints;
mod checksum;
mod consolidation;
mod error;
mod folder_lock;
mod folder_name;
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod inspection;
mod limits;
mod overlap;
mod read_plan;
mod rendezvous;
mod save;
mod shard_header;
mod source;
mod staging;
mod step;
mod step_around;
pub mod storage;
mod tensor;
mod training_state;
mod write_plan;

pub use background::BackgroundSaver;
pub use burn_fsdp_mesh::{Cut, Layout, Mesh, Partition, Placement, Region};
pub use checkpoints::{Check, Checkpoints, NewestGood, Skipped};
pub use checksum::Checksums;
pub use consolidation::{
    Consolidated, ConsolidationConfig, PlainTensor, check_outside_steps, consolidate_to_file,
    consolidate_to_folder,
};
pub use error::{BoxError, Error};
pub use folder_name::Ticket;
pub use index::{FORMAT_VERSION, FileEntry, Index, PartEntry, TensorEntry};
pub use inspection::{InspectedFile, InspectedTensor, Inspection, Totals};
pub use limits::Limits;
pub use read_plan::{FileRange, ReadPlan};
pub use rendezvous::{Alone, Rendezvous, ThreadRendezvous};
pub use safetensors::Dtype;
pub use save::{SaveRequest, Saved, save};
pub use source::{PartBytes, Snapshot, Source};
pub use staging::{Committed, Existing, Receipt, Staging, write_shard};
pub use step::{ExpectedTensor, Extra, Progress, Step, Verification};
pub use tensor::{TensorKind, TensorSpec};
pub use training_state::{DataPosition, LossScale, TrainingState};
pub use write_plan::{Assignment, WritePlan};

/// Shortens untrusted text for a message.
fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}
