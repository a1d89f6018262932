//! Programs of pointwise operations, which read and write memory only once.
//!
//! If a tensor is larger than the caches, each of `n` separate operations reads and writes it. A program runs all
//! operations while a block of elements is in the first-level cache. Every operation rounds like Burn's CPU backend, so
//! the results have the same bits.

mod program;
mod run;
#[cfg(test)]
mod tests;

pub use program::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
pub(crate) use run::run;
