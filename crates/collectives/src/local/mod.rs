//! The engine of ranks that are threads of one process.
//!
//! Ranks publish their sources and read each other's memory. `src/README.md` of this crate
//! describes the protocol and why it is right.

mod bell;
mod flight;
mod group;
mod round;
mod transfer;
mod world;

pub(crate) use world::World;
