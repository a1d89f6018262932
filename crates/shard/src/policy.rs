//! What is gathered together, and when full weights are dropped.

/// Where the full weights live between a unit's forward and its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Parameters, gradients and optimizer state are sharded; full weights are dropped after a
    /// unit's forward and gathered again for its backward (ZeRO-3).
    #[default]
    FullShard,
    /// Sharded at rest, but full weights stay from forward to backward: fewer gathers, more
    /// memory (ZeRO-2).
    ShardGradOp,
    /// Every rank holds everything; gradients are averaged by one all-reduce a unit (DDP).
    NoShard,
}

/// How [`fully_shard`](crate::fully_shard) cuts a module.
///
/// ```
/// use burn_fsdp_shard::{ShardPolicy, Strategy};
///
/// let policy = ShardPolicy::new().units(["blocks.*"]).strategy(Strategy::FullShard);
/// # let _ = policy;
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ShardPolicy {
    pub(crate) patterns: Vec<String>,
    pub(crate) strategy: Strategy,
    pub(crate) layout: Layout,
    pub(crate) whole_below: usize,
    pub(crate) prefetch: usize,
    pub(crate) keep_root: bool,
    pub(crate) axis: String,
}

/// How a parameter's elements are cut into shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// Contiguous pieces of the flattened parameter: all ranks hold nearly the same.
    #[default]
    Flat,
    /// Whole rows of dimension 0, as PyTorch's `fully_shard` does.
    Rows,
}

impl Default for ShardPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl ShardPolicy {
    /// One unit (the root), full sharding, one unit prefetched.
    pub fn new() -> Self {
        Self {
            patterns: Vec::new(),
            strategy: Strategy::FullShard,
            layout: Layout::Flat,
            whole_below: 0,
            prefetch: 1,
            keep_root: true,
            axis: "shard".to_owned(),
        }
    }

    /// Every module whose path matches one of `patterns` becomes a unit of its own; the root
    /// takes what is left. A pattern names path segments, `*` stands for any one segment:
    /// `"blocks.*"`. Where two patterns match on one path, the inner module wins.
    pub fn units<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.patterns = patterns.into_iter().map(Into::into).collect();
        self
    }

    /// Where full weights live between forward and backward.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// How parameters are cut.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Parameters of fewer than `elements` elements stay whole on every rank, as parameters of
    /// one dimension always do; their gradients share one all-reduce a step. Default 0.
    pub fn whole_below(mut self, elements: usize) -> Self {
        self.whole_below = elements;
        self
    }

    /// How many units are gathered ahead of their use. 0 gathers each unit when it is touched and
    /// waits for each reduction; every step up costs one unit of memory. Default 1.
    pub fn prefetch(mut self, units: usize) -> Self {
        self.prefetch = units;
        self
    }

    /// Whether the root drops its full weights after each use, too. Default: it keeps them from
    /// its forward to its backward, because it is needed first in both.
    pub fn reshard_root(mut self, reshard: bool) -> Self {
        self.keep_root = !reshard;
        self
    }

    /// The mesh axis to shard over. Default `"shard"`.
    pub fn axis(mut self, axis: impl Into<String>) -> Self {
        self.axis = axis.into();
        self
    }
}

/// Whether the module at `path` matches `pattern`, segment by segment.
pub(crate) fn matches(pattern: &str, path: &str) -> bool {
    let mut wanted = pattern.split('.');
    let mut found = path.split('.');
    loop {
        match (wanted.next(), found.next()) {
            (None, None) => return true,
            (Some("*"), Some(_)) => {}
            (Some(w), Some(f)) if w == f => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_exactly_one_segment() {
        assert!(matches("blocks.*", "blocks.11"));
        assert!(!matches("blocks.*", "blocks"));
        assert!(!matches("blocks.*", "blocks.1.fc"));
        assert!(matches("*.layers.*", "encoder.layers.0"));
        assert!(matches("head", "head"));
    }
}
