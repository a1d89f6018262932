//! Reads the sources of a crate: its modules, their imports, the sizes of their definitions, and the workspace's prose.
//!
//! The test `architecture` enforces the workspace's rules. The example `imports` draws the imports, and the example
//! `prose` prints the frequencies of constructions.

pub mod face;
pub mod imports;
mod modules;
pub mod prose;
pub mod sizes;
