//! Programs of pointwise operations, which read and write memory only once.
//!
//! Separate operations each read and write a tensor, which is often larger than the caches. A program runs all
//! operations while a block of elements is in the first-level cache. Every operation rounds like Burn's CPU backend, so
//! the results have the same bits.

mod program;
mod run;
#[cfg(test)]
mod tests;

pub use program::{PointwiseOperand, PointwiseOperation, PointwiseProgram};
pub(crate) use run::run;
