//! A whole train step as one SPMD graph: trace, place, passes, run.
//!
//! [`compile`] turns an unmodified Burn module, a loss closure and a Burn optimizer (or one for each group of
//! parameters) into a [`CompiledStep`] that runs on every rank of a process group:
//!
//! ```text
//! trace  ->  dead code, common subexpressions  ->  kernels  ->  recompute  ->  place, insert collectives  ->
//! deduplicate  ->  regather  ->  bucket  ->  split, prefetch, sink  ->  optimizer  ->  chains, kernels  ->  liveness  ->  run
//! ```
//!
//! With placements, kernels and recompute come after deduplicate.
//!
//! | module | stage |
//! |---|---|
//! | [`graph`] | the step as data: nodes in execution order, values by role and path |
//! | [`trace`] | the tracer: builds a graph from closures, using fake tensors |
//! | [`place`] | placement of the step's values on ranks |
//! | [`passes`] | functions from graph to graph, and the verifier |
//! | [`CustomOperations`] | operations in addition to Burn's |
//! | [`run`] | the executor, its memory table, and timelines |
//!
//! On one rank a compiled step is bit-identical to Burn's own loop if
//! [`Options::kernels`](passes::schedule::Options::kernels) are off. Its order is explicit: the list of nodes is the
//! schedule, including every gather, wait and drop.
//!
//! # Number of collectives
//!
//! A unit is a module whose parameters are communicated together, see [`Units`](passes::Units). Let U be the number of
//! units and P the number of parameters. Let B be the number of units whose weights backward reads, except the last two
//! of forward. Assume that no unit is larger than a bucket. If forward visits every unit once, a step of
//! [`Strategy::FullShard`] then takes
//!
//! | | all-gathers | reduce-scatters | all-reduces |
//! |---|---|---|---|
//! | by default | U + B | U | 1, the loss |
//! | weights kept until backward | U | U | 1 |
//! | no buckets, weights kept | P | P | 1 |
//!
//! If forward or backward returns to a unit after two others, it gathers the unit a second time and keeps it until that
//! phase last uses it. Each phase therefore takes at most 2 U all-gathers, however often a loop uses the units. Frozen
//! parameters are gathered but not reduced. Before anything runs, every step also exchanges 8 bytes to check that all
//! ranks run the same graph.
//!
//! A step of [`Strategy::NoShard`] takes as many all-reduces as there are buckets of gradients and loss, or P + 1
//! without buckets. All of these counts are independent of the number of ranks, and also hold for one rank.
//!
//! Clipping takes one more all-gather, of one number, for each set of axes along which parameters are cut, and none
//! with [`Strategy::NoShard`]. A step of several micro-batches takes the collectives of that many steps, and clips
//! once. With copies of the shards ([`Mode::hybrid`]) there are as many all-reduces over the copies as buckets of
//! shards, with the loss among them.
//!
//! A step with placements ([`Expand`], [`DataParallel::Automatic`]) takes the redistributions that its operations need,
//! see [`place`], and none on axes of one rank. For a transformer of B blocks whose layers are cut by columns and then
//! by rows, these are 4 B all-reduces: two per block in forward and two in backward. There is one more for each bucket
//! of gradients that are sums over the cut dim (the shifts of the norms). If the batch is cut on another axis, there is
//! one more for each bucket of gradients there, one for the loss, and one for each gradient that is a sum on both axes.
#![forbid(unsafe_code)]

// Test models, which unit tests also use, refer to this crate by name.
#[cfg(test)]
extern crate self as burn_fsdp_spmd;

mod compile;
mod custom;
mod dump;
mod error;
pub mod graph;
mod initial;
mod kernels;
mod lazy_dora;
mod lazy_lora;
pub mod low_bit;
mod lower;
mod mode;
#[cfg(test)]
#[path = "../tests/spmd/models.rs"]
mod models;
pub mod norm;
mod panics;
mod parts;
mod pass_id;
pub mod passes;
pub mod place;
mod ranks;
pub mod run;
mod stages;
pub mod trace;
mod transform;

pub use burn_fsdp_kernels::HalfProducts;
pub use burn_fsdp_mesh::{LossScalerState, LossScaling, Strategy};
pub use compile::{
    CompiledStep, Evaluation, IdleState, IdleTensor, OptimizerState, Override, compile,
    compile_from, compile_on, compile_with,
};
pub use custom::{CustomOperation, CustomOperations};
pub use dump::GraphDump;
pub use error::{DumpError, Error, MoveError, OptionError, OverrideError, ProofError, ScaleError};
pub use initial::ShardSpec;
pub use kernels::kernels;
pub use lazy_dora::{DoraAdapter, LazyDora};
pub use lazy_lora::LazyLora;
pub use lower::{Lower, Lowered, Lowering, Summary, lower};
pub use mode::{Certify, Mode};
pub use norm::GRAD_NORM;
pub use place::{DataParallel, Expand};
pub use stages::{PassHook, StepGraphs};
pub use trace::{Batch, BatchMapper, Loss, OptimizerGroups, cast_floats, named_activation};

/// Burn's types for the call and tensors of a [`CustomOperation`], and the trait of backends that run steps.
pub use burn_ir::{BackendIr, CustomOpIr, HandleKind};

/// The float types in which a step computes and in which it reduces gradients.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_fsdp_spmd::Precision;
///
/// let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
/// ```
pub type Precision = burn_fsdp_mesh::Precision<burn::tensor::FloatDType>;
