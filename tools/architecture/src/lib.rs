//! Reads the sources of a crate: its modules, their imports, the sizes of what they define, and the words of their comments.
//!
//! The test `architecture` holds the workspace to its rules. The example `imports` draws who imports whom.

pub mod face;
pub mod imports;
mod modules;
pub mod prose;
pub mod sizes;
