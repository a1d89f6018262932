//! The names of passes.

use std::fmt;

/// The name of a pass. Passes use it to declare which passes they follow and precede. Graphs list the names of the
/// applied passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PassId {
    /// [`AssignUnits`](crate::passes::AssignUnits).
    AssignUnits,
    /// [`DeadCode`](crate::passes::DeadCode).
    DeadCode,
    /// [`CommonSubexpressions`](crate::passes::CommonSubexpressions).
    CommonSubexpressions,
    /// [`StandIns`](crate::passes::StandIns).
    StandIns,
    /// [`UseKernels`](crate::passes::UseKernels).
    UseKernels,
    /// [`RecomputeUnits`](crate::passes::RecomputeUnits).
    RecomputeUnits,
    /// [`Recompute`](crate::passes::Recompute).
    Recompute,
    /// [`InsertCollectives`](crate::passes::InsertCollectives), or
    /// [`ExpandPlacements`](crate::place::ExpandPlacements).
    InsertCollectives,
    /// [`Deduplicate`](crate::passes::Deduplicate).
    Deduplicate,
    /// [`Regather`](crate::passes::Regather).
    Regather,
    /// [`ClipGradients`](crate::passes::ClipGradients).
    ClipGradients,
    /// [`Bucket`](crate::passes::Bucket).
    Bucket,
    /// [`Split`](crate::passes::Split).
    Split,
    /// [`Prefetch`](crate::passes::Prefetch).
    Prefetch,
    /// [`SinkWaits`](crate::passes::SinkWaits).
    SinkWaits,
    /// [`EarlyOptimizer`](crate::passes::EarlyOptimizer).
    EarlyOptimizer,
    /// [`DeferOptimizer`](crate::passes::DeferOptimizer).
    DeferOptimizer,
    /// [`MoveReductions`](crate::passes::MoveReductions).
    MoveReductions,
    /// [`Accumulate`](crate::passes::Accumulate).
    Accumulate,
    /// [`FusePointwise`](crate::passes::FusePointwise).
    FusePointwise,
    /// [`SelectKernels`](crate::passes::SelectKernels).
    SelectKernels,
    /// [`Liveness`](crate::passes::Liveness).
    Liveness,
    /// A pass of the user, by its name.
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
