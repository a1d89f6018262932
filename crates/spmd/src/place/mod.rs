//! Who has which part of which value.

/// What ranks that divide the batch do with parameters, gradients and optimizer states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataParallel {
    /// Every rank has all of them; gradients are averaged by all-reduce.
    Replicate,
    /// Every rank has a flat shard of each; parameters are gathered for their use, gradients averaged
    /// by reduce-scatter.
    FullyShard,
}
