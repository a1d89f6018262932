//! The eager engine of `burn-fsdp`: fully sharded data parallelism for any Burn module.
//!
//! [`fully_shard`] takes a module and returns it, of the same type. From then on each rank holds
//! a shard of every parameter; full weights exist only around the forward and the backward of
//! the *unit* that owns them. The training loop stays Burn's own.
//!
//! # How it works, in the order of the rooms
//!
//! - `wrap`: [`fully_shard`] finds the float parameters (`survey`), groups them into units by
//!   path (`grouping`, [`ShardPolicy`]), cuts rank 0's values (`initial`) and puts a `ShardedParam` beside
//!   each parameter (`parameter`): a Burn reparameterization, called at every `Param::val`.
//!   It has an `identity`, by which optimizers know it. `record` is what it does when Burn records it.
//! - `own_states`: running states that ranks must not share. `ambient`: what this thread is doing.
//! - `generation`: which values belong together, as optimizers, clones and records make new ones.
//! - `root`: gathers a unit at its first use, makes the autodiff nodes, collects gradients,
//!   reduces them when the unit's last one has come.
//! - `op`: the nodes in Burn's autodiff graph, and the token that makes backward go unit by unit.
//! - `schedule`: the order of operations, recorded in the first step and followed after it.
//! - `transport`: tensors as bytes. Which bytes go where is the collectives' business.
//!
//! Beside the engine, on what it holds between steps: `gradients` (who holds what of each), `clip`,
//! `scaler`, `elementwise` and `probes` (which optimizers may be used), `unmanaged` (what nobody would
//! reduce), `buffers`, `full` (whole parameters),
//! `agreement`, `auto` (units by size), and `wrapper`, which offers all of it as methods. They walk
//! over modules with `path`, and find the sharded parameters in them with `inspect`.
//!
//! [`wrap_plan`], [`memory()`] and [`order`] say what was done.

mod agreement;
mod ambient;
mod auto;
mod buffers;
mod checkpoint;
mod clip;
mod elementwise;
mod error;
mod full;
mod generation;
mod gradients;
mod grouping;
mod handle;
mod identity;
mod initial;
mod inspect;
mod leaves;
mod local;
mod memory;
mod names;
mod note;
mod offload;
mod op;
mod own_states;
mod owned;
mod parameter;
mod path;
mod pattern;
mod plan;
mod policy;
mod precision;
mod probes;
mod record;
mod report;
mod root;
mod scaler;
mod schedule;
mod slot;
mod stand_ins;
mod step;
mod survey;
mod transport;
mod unit;
mod unmanaged;
mod wrap;
mod wrapper;

pub use checkpoint::checkpoint;
pub use error::{Error, catch};
pub use handle::{UnitHandle, UnitState, Unsharding, no_sync, units, unused_units};
pub use local::{LocalId, LocalPart, LocalTensor, load_local_state, local_ids, local_state};
pub use memory::{LiveBytes, Memory, Pinned, dummy_forward, memory, reset_peak, trim};
pub use plan::{UnitPlan, WrapPlan, num_params, wrap_plan};
pub use policy::{DivideFactors, Layout, ReduceGroup, ShardPolicy, Strategy};
pub use precision::{Precision, cast_input};
pub use step::{Order, backward, order, reset};
pub use wrap::{fully_shard, replicate};

pub use agreement::{Agreement, check_agreement};
pub use auto::auto_units;
pub use buffers::{BufferSync, sync_buffers};
pub use clip::{Clip, Clipped, NonFinite, Norm, clip_grad_norm, grad_norm};
pub use elementwise::{check_elementwise, check_elementwise_once};
pub use full::{FullTensor, WriteBack, full_state, summon_full_params};
pub use gradients::{UnitGradients, gradients_by_unit, params_with_gradient};
pub use inspect::{param_id, settle_ids};
pub use names::{check_names, parameter_paths};
pub use probes::is_probe;
pub use record::into_record;
pub use scaler::{LossScaler, LossScalerState, LossScaling};
pub use stand_ins::{renew_stand_ins, stand_in_bytes};
pub use wrapper::FullyShardedDataParallel;

#[doc = include_str!("README.md")]
#[cfg(doc)]
pub mod protocol {}
