//! How a tensor lies on one mesh axis.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a tensor lies on one axis of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Every rank holds the whole tensor, all of them the same values.
    Replicate,
    /// The tensor is cut along this dim, each rank holds one part; see [`Partition`](crate::Partition).
    Shard(usize),
    /// Every rank holds an addend of the tensor's full shape; combining all of them gives the tensor.
    Partial(ReduceOp),
}

/// How the addends of several ranks become one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceOp {
    /// Added up.
    Sum,
    /// Added up, then divided by the number of ranks.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
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
