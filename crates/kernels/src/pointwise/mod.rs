//! Programs of pointwise operations, which read and write memory once.
//!
//! Composed, each of `n` operations on a tensor that is larger than the caches reads and writes it; a program goes
//! through all of them while a block of elements is in the first cache. Every operation is the one that Burn's CPU
//! backend has, with the same rounding, so that the results have the same bits.

mod program;
mod run;
#[cfg(test)]
mod tests;

pub use program::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
pub(crate) use run::{CHUNK, run, scratch_bytes};
