//! Passes: functions that transform a graph into another graph.
//!
//! A pass implements [`GraphTransform`]; [`Pipeline`] applies passes in order. A pass declares the passes that it must
//! follow and precede. Applying it twice or out of order is an error. After each pass the [`verifier`](verify()) checks
//! the graph in debug builds, and if [`Pipeline::verified`] requests it.

pub mod schedule;
pub mod verify;

mod accumulate;
mod bucket;
mod casts;
mod clip;
mod complete_early;
mod cse;
mod dead_code;
mod dedup;
mod deferred_optimizer;
mod early_optimizer;
mod halves;
mod holding;
mod iteration;
mod iteration_parts;
mod kernels;
mod liveness;
mod loss_chunks;
mod move_reductions;
mod pipeline;
mod pointwise;
mod recompute;
mod recompute_units;
mod regather;
mod replicate;
mod rewrite;
mod select_kernels;
mod shard;
mod split;
mod stand_ins;
mod unit;

pub use accumulate::{Accumulate, MicroSteps};
pub use bucket::Bucket;
pub use clip::ClipGradients;
pub use cse::CommonSubexpressions;
pub use dead_code::DeadCode;
pub use dedup::Deduplicate;
pub use deferred_optimizer::DeferOptimizer;
pub use early_optimizer::EarlyOptimizer;
pub use iteration::{IterationGraph, IterationMove};
pub use iteration_parts::Iteration;
pub use kernels::UseKernels;
pub use liveness::Liveness;
pub use loss_chunks::LossChunks;
pub use move_reductions::MoveReductions;
pub use pipeline::{Pipeline, apply};
pub use pointwise::FusePointwise;
pub use recompute::Recompute;
pub use recompute_units::{RecomputeUnits, UnitVisit, unit_visits};
pub use regather::Regather;
pub use replicate::Replicate;
pub use select_kernels::SelectKernels;
pub use shard::InsertCollectives;
pub use split::{Prefetch, SinkWaits, Split};
pub use stand_ins::StandIns;
pub use unit::{AssignUnits, Units, unit_of};
pub use verify::verify;

pub use crate::pass_id::PassId;
pub use crate::transform::{GraphTransform, PassState};
