//! The policy's hooks: functions of the user that change gradients, or replace collectives of the engine.
//!
//! - `gradient`: changes a gradient before it is reduced.
//! - `gather` and `reduction`: gather parameters and reduce gradients in place of the engine.
//! - `replacement`: the call of such a function. `pending`: the tensors that it returns, before they exist. `results`:
//!   checks these tensors.

mod gather;
mod gradient;
mod pending;
mod reduction;
mod replacement;
mod results;

pub(crate) use gather::GatherHook;
pub use gather::{ParameterShard, UnitGather};
pub(crate) use gradient::GradientHook;
pub use pending::PendingTensors;
pub(crate) use reduction::ReductionHook;
pub use reduction::{FullGradient, ReductionStage, UnitReduction};

/// The hooks of a policy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hooks {
    pub(crate) gradient: Option<GradientHook>,
    /// Reduces a unit's gradients over the ranks that hold its shards.
    pub(crate) reduction: Option<ReductionHook>,
    /// Reduces over the replicas, and reduces the gradients of parameters kept whole.
    pub(crate) all_reduce: Option<ReductionHook>,
    pub(crate) gather: Option<GatherHook>,
}
