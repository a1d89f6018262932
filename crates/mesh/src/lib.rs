//! Layout arithmetic of burn-fsdp: which rank owns which part of a tensor.
//!
//! - [`Mesh`]: ranks laid out as an n-d array with named [`Axis`]es.
//! - [`Placement`]: the arrangement of a tensor on one mesh axis.
//! - [`Layout`]: the placements of a tensor on a whole mesh, and where shards may begin; [`Region`]: the elements
//!   that one rank holds.
//! - [`Partition`]: the ranges of one tensor's elements that the ranks own.
//! - [`balanced_owners`]: the owners of parameters that are not divided.
//! - [`Strategy`]: which state is sharded, and how long full parameters are kept.
//! - [`Clip`]: the options for clipping gradients by their norm; [`Measure`]: each element's contribution to a norm.
//! - [`Precision`]: the types of computation and of gradient reduction.
//! - [`LossScaling`]: the scale of a loss in half precision, from step to step.
//! - [`Pattern`]: a set of dotted paths.
//! - [`transfers`]: the pieces that move when a tensor is resharded.
//! - [`field`]: arithmetic without rounding, to check how gradients are processed.
//!
//! Everything here is a small value computed from sizes. The crate does not depend on tensors, threads, files or
//! communication. Ranks that compute a layout from the same sizes get the same layout.
//!
//! ```
//! use burn_fsdp_mesh::{Mesh, Partition};
//!
//! let mesh = Mesh::new([("replicate", 2), ("shard", 4)])?;
//! assert_eq!(mesh.coordinate(6)?, [1, 2]);
//! assert_eq!(mesh.ranks_along("shard", 6)?, [4, 5, 6, 7]);
//! assert_eq!(mesh.ranks_along("replicate", 6)?, [2, 6]);
//!
//! let partition = Partition::flat(10, 4)?;
//! assert_eq!(partition.range(0), 0..3);
//! assert_eq!(partition.range(3), 9..10);
//! # Ok::<(), burn_fsdp_mesh::Error>(())
//! ```
#![forbid(unsafe_code)]

mod error;
pub mod field;
mod layout;
mod mesh;
mod norm;
mod owners;
mod partition;
mod pattern;
mod placement;
mod precision;
mod region;
mod scaling;
mod strategy;
mod transfer;

pub use error::Error;
pub use layout::{AxisPlacement, Cut, Layout, local_shape};
pub use mesh::{Axis, Mesh};
pub use norm::{Clip, Measure, NonFinite, Norm};
pub use owners::balanced_owners;
pub use partition::Partition;
pub use pattern::Pattern;
pub use placement::{Placement, ReduceOp};
pub use precision::Precision;
pub use region::{Region, num_elements};
pub use scaling::{LossScalerState, LossScaling, ScalingFault};
pub use strategy::Strategy;
pub use transfer::{Transfer, transfers};
