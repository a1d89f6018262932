//! Placements: the arrangement of a tensor on one mesh axis.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The arrangement of a tensor on one axis of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// A copy of the whole tensor on every rank.
    Replicate,
    /// A part of the tensor on every rank, cut along this dim; see [`Partition`](crate::Partition).
    Shard(usize),
    /// An addend with the tensor's full shape on every rank. The tensor is the combination of all addends.
    Partial(ReduceOp),
}

/// The operation that combines the addends of several ranks into one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum, divided by the number of ranks.
    Mean,
    /// The largest addend.
    Max,
    /// The smallest addend.
    Min,
}

/// Prints as `replicate`, `shard(0)` or `partial(sum)`.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Shard(dim) => write!(f, "shard({dim})"),
            Self::Partial(op) => write!(f, "partial({op})"),
        }
    }
}

/// Prints as `sum`, `mean`, `max` or `min`.
impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}
