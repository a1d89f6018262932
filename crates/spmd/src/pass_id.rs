//! The names of passes.

use std::fmt;

/// The name of a pass. Passes use it to declare which passes they follow and precede. Graphs list the names of the
/// applied passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PassId {
    /// The pass [`AssignUnits`](crate::passes::AssignUnits).
    AssignUnits,
    /// The pass [`DeadCode`](crate::passes::DeadCode).
    DeadCode,
    /// The pass [`CommonSubexpressions`](crate::passes::CommonSubexpressions).
    CommonSubexpressions,
    /// The pass [`StandIns`](crate::passes::StandIns).
    StandIns,
    /// The pass [`LossChunks`](crate::passes::LossChunks).
    LossChunks,
    /// The pass [`UseKernels`](crate::passes::UseKernels).
    UseKernels,
    /// The pass [`RecomputeUnits`](crate::passes::RecomputeUnits).
    RecomputeUnits,
    /// The pass [`Recompute`](crate::passes::Recompute).
    Recompute,
    /// The pass [`InsertCollectives`](crate::passes::InsertCollectives), or
    /// [`ExpandPlacements`](crate::place::ExpandPlacements).
    InsertCollectives,
    /// The pass [`Deduplicate`](crate::passes::Deduplicate).
    Deduplicate,
    /// The pass [`Regather`](crate::passes::Regather).
    Regather,
    /// The pass [`ClipGradients`](crate::passes::ClipGradients).
    ClipGradients,
    /// The pass [`Bucket`](crate::passes::Bucket).
    Bucket,
    /// The pass [`Split`](crate::passes::Split).
    Split,
    /// The pass [`Prefetch`](crate::passes::Prefetch).
    Prefetch,
    /// The pass [`SinkWaits`](crate::passes::SinkWaits).
    SinkWaits,
    /// The pass [`EarlyOptimizer`](crate::passes::EarlyOptimizer).
    EarlyOptimizer,
    /// The pass [`DeferOptimizer`](crate::passes::DeferOptimizer).
    DeferOptimizer,
    /// The pass [`MoveReductions`](crate::passes::MoveReductions).
    MoveReductions,
    /// The pass [`Accumulate`](crate::passes::Accumulate).
    Accumulate,
    /// The pass [`FusePointwise`](crate::passes::FusePointwise).
    FusePointwise,
    /// The pass [`SelectKernels`](crate::passes::SelectKernels).
    SelectKernels,
    /// The pass [`Liveness`](crate::passes::Liveness).
    Liveness,
    /// A user's pass, by name.
    User(&'static str),
}

/// Prints the name in words, such as `insert collectives`.
impl fmt::Display for PassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AssignUnits => "units",
            Self::DeadCode => "dead code",
            Self::CommonSubexpressions => "common subexpressions",
            Self::StandIns => "stand-ins",
            Self::LossChunks => "loss chunks",
            Self::UseKernels => "use kernels",
            Self::RecomputeUnits => "recompute units",
            Self::Recompute => "recompute",
            Self::InsertCollectives => "insert collectives",
            Self::Deduplicate => "deduplicate collectives",
            Self::Regather => "regather",
            Self::ClipGradients => "clip gradients",
            Self::Bucket => "bucket collectives",
            Self::Split => "split collectives",
            Self::Prefetch => "prefetch",
            Self::SinkWaits => "sink waits",
            Self::EarlyOptimizer => "early optimizer",
            Self::DeferOptimizer => "deferred optimizer",
            Self::MoveReductions => "move reductions",
            Self::Accumulate => "accumulate",
            Self::FusePointwise => "fuse pointwise",
            Self::SelectKernels => "select kernels",
            Self::Liveness => "liveness",
            Self::User(name) => name,
        })
    }
}
