//! The eager engine of `burn-fsdp`: fully sharded data parallelism for any Burn module.
//!
//! [`fully_shard`] takes a module and returns a module of the same type. From then on each rank holds a shard
//! of every parameter. Full weights exist only around the forward and the backward of the *unit* that owns
//! them. The training loop stays Burn's own.
//!
//! # Structure
//!
//! The foundation, which does not know of units:
//!
//! - `policy`, `gradient_hook`, `reduction_hook`: the user's settings.
//! - `error`, `thrown` (errors that leave Burn), `read` (the parameter that was read last, for errors), `report`
//!   (warnings), `device`, `path` (walks that know where they are), `pins` (buffers by their lifetime), `transport`
//!   (tensors as bytes; collectives decide which bytes go where).
//! - `probes`: the trial of the optimizer at its first step, which finds out whether it may work on shards.
//! - `ambient`: the purpose of a walk on this thread. `region`: the recomputed region it is in.
//! - `audit`: whether each gradient of a step was summed and divided once.
//! - `packing`: shards in 8 bits, in transit.
//! - `adapter`: a weight and its low-rank adapter in arithmetic.
//! - `schedule`: the order of operations, recorded in the first step and followed later.
//! - `op`: the nodes in Burn's autodiff graph, and the token that makes backward run unit by unit.
//!
//! The engine:
//!
//! - `shown`, `slot`, `offload`, `spec`, `unit`: one parameter as optimizers see it, the parameter in its unit, a
//!   unit's fixed properties, and its mutable state.
//! - `copies`: the values that belong together, as optimizers, clones and records create new ones, and the
//!   life cycle of the full parameters made of them.
//! - `root`: gathers a unit at its first use, creates the autodiff nodes, collects gradients, and reduces them when the
//!   unit's last gradient has arrived.
//! - `parameter`: the form in which Burn sees a sharded parameter, a reparameterization that is
//!   called at every `Param::val`.
//! - `survey`: the float tensors of a module by kind, before it is sharded. `layer`: rules for single types of
//!   layers.
//!
//! Around the engine:
//!
//! - `inspect`: finds the sharded parameters of a module, and reports its units, plan, order and memory.
//! - `state`: reads, saves and changes a module's state between steps. `optim`: work on gradients between
//!   backward and the optimizer.
//! - `wrap`: [`fully_shard`] groups parameters into units by path, cuts rank 0's values and puts a
//!   `ShardedParam` beside each parameter, or a `TiedParam` beside a clone of one.
//! - `unmanaged`: parameters that would not be reduced.
//! - `recompute` (activations computed again), `numbers` (random ones, drawn again), `leaves` and `step` ([`backward`] and what surrounds it).
//! - `wrapper` offers all of it as methods.
//!
//! A file imports only from parts before its own, and files never import each other in a cycle.
//!
//! [`wrap_plan`], [`memory()`] and [`order`] report the result.

mod adapter;
mod ambient;
mod audit;
mod copies;
mod device;
mod error;
mod evaluate;
mod gradient_hook;
mod inspect;
mod layer;
mod leaves;
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
mod reduction_hook;
mod region;
mod report;
mod root;
mod schedule;
mod seal;
mod shown;
mod slot;
mod spec;
mod staging;
mod state;
mod step;
mod survey;
mod thrown;
mod transport;
mod unit;
mod unmanaged;
mod wrap;
mod wrapper;

pub use audit::Audit;
pub use burn_fsdp_mesh::{Clip, Cut, LossScalerState, LossScaling, NonFinite, Norm, Strategy};
pub use copies::UnitState;
pub use error::Error;
pub use evaluate::evaluate;
pub use inspect::memory::{LiveBytes, Memory, dummy_forward, memory, reset_peak, trim};
pub use inspect::order::{Order, num_audited, order};
pub use inspect::plan::{UnitPlan, WrapPlan, num_params, wrap_plan};
pub use inspect::units::{UnitHandle, UnitMemory, Unsharding, no_sync, units, unused_units};
pub use pins::Pinned;
pub use policy::{DivideFactors, ReduceGroup, ShardPolicy};
pub use probes::is_probe;
pub use recompute::recompute;
pub use reduction_hook::{FullGradient, UnitReduction};
pub use state::local::{LocalId, LocalPart, LocalTensor, load_local_state, local_ids, local_state};
pub use step::{backward, input_type, reset};
pub use thrown::catch;
pub use wrap::{InitialPart, fully_shard, fully_shard_from, replicate};

pub use inspect::auto::auto_units;
pub use inspect::names::{check_names, parameter_paths};
pub use inspect::settle_ids;
pub use optim::clip::{Clipped, clip_grad_norm, grad_norm};
pub use optim::elementwise::{
    Probe, check_elementwise, check_elementwise_once, check_same_optimizer,
};
pub use optim::gradients::{
    UnitGradients, gradients_by_unit, owner_groups, params_with_gradient, shard_groups,
    units_of_params,
};
pub use optim::low_bit::{LowBitOptimizer, LowBitState, StateFormat};
pub use optim::scaler::LossScaler;
pub use optim::sealed::{SealedOptimizer, SealedState};
pub use parameter::param_id;
pub use staging::{Staged, Transfers};
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

/// The types of computation and of gradient reduction, as Burn names them.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_fsdp_shard::Precision;
///
/// let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
/// ```
pub type Precision = burn_fsdp_mesh::Precision<burn::tensor::FloatDType>;
