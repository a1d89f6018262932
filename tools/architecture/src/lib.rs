//! Reads the sources of a crate: its modules, their imports, the sizes of their definitions, and the words of their
//! comments.
//!
//! The test `architecture` enforces the workspace's rules. The example `imports` draws the imports.

pub mod face;
pub mod imports;
mod modules;
pub mod prose;
pub mod sizes;
