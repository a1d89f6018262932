//! Who has which part of which value.
//!
//! There are two ways to divide a step among ranks:
//!
//! - [`DataParallel`]: every rank runs the loss on its part of the batch, as in eager training, and
//!   ranks combine gradients. Statistics inside the loss are those of the rank's part.
//! - [`Expand`]: the loss is that of the **joined** batch, and every value of the step gets a
//!   [`Placement`](burn_fsdp_mesh::Placement) on every axis of a mesh, by propagation from those of
//!   parameters and inputs. This is tensor parallelism where parameters are cut, data parallelism where
//!   the batch is, and both on a mesh with two axes; the result is that of one rank.
//!
//! # Propagation
//!
//! Every operation has a signature that names its dims as in an einsum, see the files of `rules`. On
//! each mesh axis it then runs in the way that moves the fewest bytes: on whole operands, on operands cut
//! along one letter, or on addends. Where an operand lies otherwise it is redistributed before:
//!
//! | from | to | how |
//! |---|---|---|
//! | `replicate` | `shard(d)` | a slice, nothing moves |
//! | `shard(d)` | `replicate` | all-gather |
//! | `partial(op)` | `replicate` | all-reduce |
//! | `partial(sum or mean)` | `shard(d)` | reduce-scatter |
//! | `shard(c)` | `shard(d)` | all-to-all; all-gather and slice where another axis cuts `d` |
//!
//! What is made of nothing (zeros, random numbers) has no place until something reads it, and is made
//! where it is read. A value that has been redistributed once is not moved again.

mod expand;
mod located;
mod placer;
mod propagate;
mod redistribute;
mod rules;
mod search;
mod signature;
mod strategy;

pub use expand::Expand;
pub use propagate::ExpandPlacements;
pub use search::least_communication;

pub use crate::graph::{AxisPlacement, local_shape};

pub(crate) use search::least_communication_with;

/// What ranks that divide the batch do with parameters, gradients and optimizer states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataParallel {
    /// Every rank has all of them; gradients are averaged by all-reduce.
    Replicate,
    /// Every rank has a flat shard of each; parameters are gathered for their use, gradients averaged
    /// by reduce-scatter.
    FullyShard,
    /// The batch is joined, and every parameter is replicated or cut along the dim that makes the whole
    /// step move the fewest bytes, see [`least_communication`].
    Default,
}
