//! Groups of ranks and their operations, on any engine.

mod call;
mod checked;
mod collective;
mod counter;
mod part;
mod pending;
mod process_group;
mod process_mesh;
mod received;
mod sealing;
mod split;
mod started;

pub use counter::CommCounter;
pub use part::{CrossPart, FullPart, Part};
pub use pending::Pending;
pub use process_group::ProcessGroup;
pub use process_mesh::{AsMesh, ProcessMesh};
pub use received::Received;
pub use sealing::Keeper;
