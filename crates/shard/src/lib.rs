//! The eager engine of `burn-fsdp`: fully sharded data parallelism for any Burn module.
//!
//! [`fully_shard`] takes a module and returns a module of the same type. From then on each rank holds only its shards
//! of the parameters. Full weights exist only around the forward and the backward of the *unit* to which they belong.
//! The training loop remains Burn's own.
//!
//! # Structure
//!
//! The foundation, which does not depend on units:
//!
//! - `policy`, `divide_factors`, `hooks`: the user's settings.
//! - `error`, `thrown` (errors that unwind through Burn), `read` (the last parameter read, for errors), `report`
//!   (warnings), `files` (values in files), `device`, `path` (module walks that track the current path), `pins` (buffers
//!   that live too long), `convert` (tensors with the type and device of others). The crate `tensors` converts between
//!   tensors and bytes.
//! - `probes`: the trial of the optimizer at its first step, which determines whether it may work on shards.
//! - `ambient`: the purpose of a walk on this thread. `region`: the recomputed region that the thread is in, and the
//!   uses of units that belong to it.
//! - `audit`: the check that each gradient of a step was summed and divided once.
//! - `packing`: forms of shards in fewer bits. `base_bits`: a frozen base's form.
//! - `adapter`: the arithmetic of a weight and its low-rank adapter.
//! - `schedule`: the order of operations, recorded in the first step and followed later.
//! - `op`: the nodes in Burn's autodiff graph, and the token that makes backward run unit by unit.
//!
//! The engine:
//!
//! - `shown` (a parameter as optimizers see it), `slot` (a parameter in its unit), and a unit's `offload` (devices),
//!   `spec` (fixed properties) and `unit` (mutable state).
//! - `copies`: the sets of values that optimizers, clones and records create, and the life cycle of the full parameters
//!   gathered from them.
//! - `root`: gathers a unit at its first use, creates the autodiff nodes, collects gradients, and reduces them once the
//!   unit's gradients are complete.
//! - `parameter`: the form in which Burn sees a sharded parameter: a reparameterization that is called at every
//!   `Param::val`.
//! - `survey`: the float tensors of a module by kind, before it is sharded. `layer`: rules for specific layer types.
//!
//! Around the engine:
//!
//! - `inspect`: finds the sharded parameters of a module, and reports its units, plan, order and memory.
//! - `state`: reads, saves and changes a module's state between steps. `optim`: gradients between backward and the
//!   optimizer, checks of optimizers, and optimizers with compact or checked states.
//! - `wrap`: [`fully_shard`] groups parameters into units by path, shards rank 0's values, and attaches a
//!   `ShardedParam` to each parameter, or a `TiedParam` to a clone of one.
//! - `unmanaged`: detects trained parameters that no unit would reduce.
//! - `activations` (inputs of regions on the host), `nest` (inputs and outputs of a region), `recompute` (activation
//!   checkpointing), `numbers` (repeats the random numbers of a region), `leaves` (autodiff leaves that ranks share),
//!   `step` ([`backward`]) and `stepping` ([`backward_and_step`]).
//! - `wrapper`: a module type that has the most common functions as methods.
//!
//! A file imports only from parts listed before its own, and there are no import cycles.
//!
//! [`wrap_plan`], [`memory()`] and [`order`] report the result of sharding.

mod activations;
mod adapter;
mod ambient;
mod audit;
mod base_bits;
mod convert;
mod copies;
mod device;
mod divide_factors;
mod error;
mod evaluate;
mod files;
mod hooks;
mod inspect;
mod layer;
mod leaves;
mod nest;
mod numbers;
mod offload;
mod op;
mod optim;
mod packing;
mod parameter;
mod path;
mod pins;
mod policy;
mod probes;
mod read;
mod recompute;
mod region;
mod report;
mod root;
mod schedule;
mod seal;
mod shown;
mod slot;
mod spec;
mod state;
mod step;
mod stepping;
mod survey;
mod thrown;
mod unit;
mod unmanaged;
mod wrap;
mod wrapper;

pub use activations::{offload_activations, refuse_offload_in_trace};
pub use audit::Audit;
pub use base_bits::BaseBits;
pub use burn_fsdp_mesh::{Clip, Cut, LossScalerState, LossScaling, NonFinite, Norm, Strategy};
pub use burn_fsdp_tensors::{Staged, StateFormat, Transfers, launch};
pub use copies::UnitState;
pub use divide_factors::DivideFactors;
pub use error::Error;
pub use evaluate::evaluate;
pub use files::ShardFileError;
pub use hooks::{
    FullGradient, ParameterShard, PendingTensors, ReductionStage, UnitGather, UnitReduction,
};
pub use inspect::memory::{LiveBytes, Memory, dummy_forward, memory, reset_peak, trim};
pub use inspect::order::{Order, num_audited, order};
pub use inspect::plan::{UnitPlan, WrapPlan, num_params, wrap_plan};
pub use inspect::units::{UnitHandle, UnitMemory, Unsharding, no_sync, units, unused_units};
pub use pins::Pinned;
pub use policy::{ReduceGroup, ShardPolicy};
pub use probes::is_probe;
pub use recompute::{recompute, region_device};
pub use state::local::{LocalId, LocalPart, LocalTensor, load_local_state, local_ids, local_state};
pub use step::{backward, input_type, reset};
pub use stepping::backward_and_step;
pub use thrown::catch;
pub use wrap::{InitialPart, fully_shard, fully_shard_from, replicate};

pub use inspect::auto::auto_units;
pub use inspect::names::{check_names, parameter_paths};
pub use inspect::settle_ids;
pub use optim::clip::{Clipped, clip_grad_norm, grad_norm};
pub use optim::elementwise::{
    Probe, check_elementwise, check_elementwise_once, check_same_optimizer,
};
pub use optim::full_gradients::{full_gradients, shard_gradients};
pub use optim::gradients::{
    UnitGradients, gradients_by_unit, owner_groups, params_with_gradient, shard_groups,
    units_of_params,
};
pub use optim::low_bit::{LowBitOptimizer, LowBitState};
pub use optim::scaler::LossScaler;
pub use optim::sealed::{SealedOptimizer, SealedState};
pub use parameter::param_id;
pub use state::agreement::{Agreement, check_agreement};
pub use state::average::moving_average;
pub use state::buffers::{BufferSync, cast_buffers, sync_buffers};
pub use state::full::{FullTensor, WriteBack, full_state, summon_full_params, unsharded};
pub use state::record::into_record;
pub use state::recorded::{RecordedTensor, recorded_state};
pub use state::stand_ins::{renew_stand_ins, stand_in_bytes};
pub use wrapper::FullyShardedDataParallel;

#[doc = include_str!("README.md")]
#[cfg(doc)]
pub mod protocol {}

/// The element types of computation and gradient reduction, as Burn types.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_fsdp_shard::Precision;
///
/// let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
/// ```
pub type Precision = burn_fsdp_mesh::Precision<burn::tensor::FloatDType>;
