//! Running a graph on a Burn backend.
//!
//! An [`Executor`] owns one rank's tensors and replays a graph's nodes through Burn's
//! [`TensorInterpreter`](burn_router::TensorInterpreter), which works for every backend. Collectives go to the rank's
//! [`ProcessGroup`](burn_fsdp_collectives::ProcessGroup). The executor counts the bytes of all its tensors in its own
//! table ([`MemoryTable`]) and can record a [`Timeline`].

mod collective;
mod executor;
mod failed;
mod finish;
mod given;
mod memory;
mod patched;
mod random;
mod results;
mod sealed;
mod seals;
mod timeline;

pub use executor::{Executor, Results};
pub use memory::MemoryTable;
pub use timeline::{Span, Timeline};
