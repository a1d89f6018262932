//! Placement of the values of a step on ranks.
//!
//! There are two ways to divide a step among ranks:
//!
//! - [`DataParallel`]: every rank runs the loss on its part of the batch, as in eager training, and ranks combine
//!   gradients. Statistics inside the loss cover only the rank's part.
//! - [`Expand`]: the loss covers the **joined** batch of all ranks, and every value of the step gets a
//!   [`Placement`](burn_fsdp_mesh::Placement) on every axis of a mesh, propagated from the placements of parameters and
//!   inputs. Sharded parameters mean tensor parallelism, a sharded batch means data parallelism, and a mesh with two
//!   axes allows both. The result is the same as on one rank.
//!
//! # Propagation
//!
//! Every operation has a signature that names its dims as in an einsum; see the files in `rules`. On each mesh axis it
//! runs in the way that moves the fewest bytes: on whole operands, on operands sharded along one letter, or on addends.
//! An operand with another placement is redistributed first:
//!
//! | from | to | how |
//! |---|---|---|
//! | `replicate` | `shard(d)` | a slice, nothing moves |
//! | `shard(d)` | `replicate` | all-gather |
//! | `partial(op)` | `replicate` | all-reduce |
//! | `partial(sum or mean)` | `shard(d)` | reduce-scatter |
//! | `shard(c)` | `shard(d)` | all-to-all; all-gather and slice if another axis shards `d` |
//!
//! The parts of a dim that does not divide evenly are padded, see `padding.rs`.
//!
//! Constants and random numbers are deferred: they have no placement until a node reads them. They are emitted with the
//! placement that this node needs, or the placement requested for their name. Redistributed values are reused.

mod assignment;
mod expand;
mod located;
mod padded;
mod padding;
mod placer;
mod propagate;
mod redistribute;
mod rules;
mod search;
mod signature;
mod travelling;
mod typing;

pub use expand::Expand;
pub use propagate::ExpandPlacements;
pub use search::least_communication;

pub use burn_fsdp_mesh::{AxisPlacement, Strategy, local_shape};

#[cfg(feature = "faults")]
pub use rules::mutants;
pub(crate) use rules::{is_pointwise, may_wait, signature_of};
pub(crate) use search::{cut_inputs, least_communication_with};
pub(crate) use signature::{Letter, Operand, Signature};
pub use typing::owned_of;
pub(crate) use typing::{check as check_types, types_of};

/// The layout of parameters in data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataParallel {
    /// One strategy for all parameters. Sharded parameters are flat shards, which are gathered for use. Their gradients
    /// are averaged by reduce-scatter.
    Strategy(Strategy),
    /// Placements for little communication in a step over the joined batch: every parameter is replicated, or sharded
    /// along a dim, see [`least_communication`].
    Automatic,
}

impl DataParallel {
    /// Returns true if every rank holds a flat shard of each parameter.
    pub(crate) fn is_sharded(self) -> bool {
        match self {
            Self::Strategy(Strategy::FullShard | Strategy::ShardGradOp) => true,
            Self::Strategy(Strategy::NoShard) | Self::Automatic => false,
        }
    }
}

impl From<Strategy> for DataParallel {
    fn from(strategy: Strategy) -> Self {
        Self::Strategy(strategy)
    }
}
