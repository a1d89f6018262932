//! The strategy of sharded training: which state is sharded, and how long full parameters are kept.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which state is sharded among ranks, and how long full parameters are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Sharded parameters, gradients and optimizer state. Full parameters are dropped after a unit's forward and
    /// gathered again for its backward (ZeRO-3).
    #[default]
    FullShard,
    /// The same shards between steps, but full parameters are kept from forward to backward: fewer gathers, more memory
    /// (ZeRO-2).
    ShardGradOp,
    /// No shards: every rank holds everything, and gradients are averaged by all-reduce (DDP).
    NoShard,
}

/// Prints as `full-shard`, `shard-grad-op` or `no-shard`.
impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FullShard => "full-shard",
            Self::ShardGradOp => "shard-grad-op",
            Self::NoShard => "no-shard",
        })
    }
}
