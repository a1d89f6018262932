//! Fully sharded data-parallel training for [Burn](https://burn.dev). Parameters, gradients and optimizer
//! state are kept in shards, and the full weights of a unit exist only around its own forward and backward.
//! Model code, optimizer and training loop stay unchanged.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_fsdp::optim::check_elementwise;
//! use burn_fsdp::{
//!     backward, fully_shard, launch, Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy,
//! };
//!
//! #[derive(Module, Debug)]
//! struct Net {
//!     layers: Vec<Linear>,
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let losses = launch(LaunchConfig::new(2), |world| {
//!     let device = Device::flex().autodiff().gradient_checkpointing();
//!     let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
//!     let net = Net { layers: (0..4).map(|_| LinearConfig::new(32, 32).init(&device)).collect() };
//!     let mut net = fully_shard(net, &mesh, ShardPolicy::new().units(["layers.*"]))?;
//!     let mut optim = AdamWConfig::new().init();
//!     // Refuses what computes with whole tensors: clipping inside the optimizer, Muon and their kind.
//!     check_elementwise(&net, &optim)?;
//!     let mut last = f32::INFINITY;
//!     for _ in 0..3 {
//!         let batch = Tensor::<2>::ones([4, 32], &device) * (1 + world.rank()) as f32;
//!         let output = net.layers.iter().fold(batch, |x, layer| layer.forward(x));
//!         let loss = output.powf_scalar(2.0).mean();
//!         last = loss.clone().into_scalar::<f32>();
//!         let gradients = backward(loss, &net)?;
//!         net = optim.step(1e-3, net, gradients);
//!     }
//!     Ok::<_, Error>(last)
//! })?;
//! assert_eq!(losses.len(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! The root has the items that every training run uses: ranks ([`launch`], [`ProcessGroup`], [`ProcessMesh`],
//! [`Mesh`]), sharding ([`fully_shard`], [`ShardPolicy`], or both as the wrapper [`FullyShardedDataParallel`]), the
//! step ([`backward`], [`catch`], [`no_sync`], [`recompute`], [`clip_grad_norm`], [`LossScaler`]), the files ([`save`],
//! [`resume`], [`Checkpointer`]), and one [`Error`] for all of it. Everything else is in a module:
//!
//! - [`sharding`]: the smaller parts of a policy, and the error of the eager engine.
//! - [`inspect`]: reports on units, costs and communication.
//! - [`state`]: whole parameters, records, running states, and the agreement of ranks.
//! - [`optim`]: work on gradients between backward and the optimizer.
//! - [`checkpoint`]: snapshots, restoring, and the steps on disk.
//! - [`compile`]: a whole train step as one graph, which uses the same checkpoints.
//! - [`plan`]: the memory, traffic and time of a step, before it runs.
//! - [`collectives`], [`mesh`]: the operations between ranks, and the layout of ranks and tensors.
//! - [`train`]: Burn's own training loop, `SupervisedTraining`, over sharded modules (feature `train`).
//! - [`allocator`]: keeps memory that tensors free on the host.
//! - [`testing`]: faults, and counters of operations.

pub mod allocator;
mod blocking;
mod checkpointer;
mod compiled;
mod device_name;
mod dtype;
mod error;
mod file_backed;
mod file_backed_steps;
mod inputs;
mod optimizer_cut;
mod optimizer_record;
mod optimizer_state;
mod optimizer_whole;
mod piecewise;
mod recompute;
mod rendezvous;
mod restore;
mod scaler;
mod snapshot;
mod state_types;
mod tied;
#[cfg(feature = "train")]
pub mod train;

pub use blocking::{resume, save};
pub use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
pub use burn_fsdp_mesh::{Mesh, Placement};
pub use burn_fsdp_shard::{
    Clip, FullyShardedDataParallel, LossScaler, Precision, ShardPolicy, Strategy, backward, catch,
    clip_grad_norm, fully_shard, no_sync, replicate,
};
pub use checkpointer::Checkpointer;
pub use device_name::{DeviceName, DeviceNameError};
pub use error::Error;
pub use inputs::cast_input;
pub use recompute::recompute;

/// The smaller parts of a [`ShardPolicy`], sharding of values that each rank reads, evaluation with different routes,
/// and the error of the eager engine.
pub mod sharding {
    pub use burn_fsdp_shard::{
        Audit, Cut, DivideFactors, Error, FullGradient, InitialPart, ReduceGroup, UnitReduction,
        evaluate, fully_shard_from,
    };
}

/// Reports on a module's units, costs and communication.
pub mod inspect {
    pub use burn_fsdp_shard::{
        LiveBytes, Memory, Order, Pinned, Staged, Transfers, UnitHandle, UnitMemory, UnitPlan,
        UnitState, Unsharding, WrapPlan, auto_units, check_names, dummy_forward, memory,
        num_audited, num_params, order, param_id, parameter_paths, reset_peak, stand_in_bytes,
        trim, units, unused_units, wrap_plan,
    };
}

/// Access to the state of a sharded module: whole parameters, records, one rank's parts, running states, ids.
pub mod state {
    pub use crate::optimizer_whole::{shard_optimizer, unsharded_optimizer};
    pub use burn_fsdp_shard::{
        Agreement, BufferSync, FullTensor, LocalId, LocalPart, LocalTensor, RecordedTensor,
        WriteBack, cast_buffers, check_agreement, full_state, into_record, load_local_state,
        local_ids, local_state, moving_average, recorded_state, renew_stand_ins, reset, settle_ids,
        summon_full_params, sync_buffers, unsharded,
    };
}

/// The work between backward and the optimizer: norms, loss scaling, gradients by unit, the check whether an
/// optimizer may work on shards, and state in files.
pub mod optim {
    pub use crate::file_backed::FileBackedOptimizer;
    pub use burn_fsdp_shard::{
        Clipped, LossScalerState, LossScaling, LowBitOptimizer, LowBitState, NonFinite, Norm,
        STATE_BLOCK, SealedOptimizer, SealedState, StateFormat, UnitGradients, check_elementwise,
        check_elementwise_once, check_same_optimizer, grad_norm, gradients_by_unit, owner_groups,
        params_with_gradient,
    };
}

/// The files of training runs: snapshots of sharded models, restoring, and the steps on disk (format, plans, storage,
/// commit, consolidation).
///
/// [`save`](save()), [`resume`] and [`Checkpointer`] are enough for most programs.
pub mod checkpoint {
    pub use crate::blocking::Resumed;
    pub use crate::checkpointer::{NotFiniteTensor, Offered, SaveRemark};
    pub use crate::error::CheckpointError;
    pub use crate::rendezvous::GroupRendezvous;
    pub use crate::restore::{restore, restore_matching, restore_model, restore_training};
    pub use crate::scaler::{loss_scale, restore_scaler};
    pub use crate::snapshot::{TrainingSnapshot, snapshot, snapshot_matching};
    pub use burn_fsdp_checkpoint::{
        Alone, Assignment, BackgroundSaver, BoxError, Check, Checkpoints, Checksums, Committed,
        Consolidated, ConsolidationConfig, Cut, DataPosition, Dtype, Error, Existing,
        ExpectedTensor, Extra, FORMAT_VERSION, FileEntry, FileRange, Index, InspectedFile,
        InspectedTensor, Inspection, Layout, Limits, LossScale, NewestGood, PartBytes, PartEntry,
        PlainTensor, Progress, ReadPlan, Receipt, Region, Rendezvous, SaveRequest, Saved, Skipped,
        Snapshot, Source, Staging, Step, TensorEntry, TensorKind, TensorSpec, ThreadRendezvous,
        Ticket, Totals, TrainingState, Verification, WritePlan, consolidate_to_file,
        consolidate_to_folder, save as save_step, storage, write_shard,
    };
}

/// The compiler of a whole train step to one graph, and conversions from and to sharded modules.
pub mod compile {
    pub use crate::compiled::{
        load_compiled, restore_compiled, restore_compiled_matching, snapshot_compiled,
        snapshot_compiled_matching,
    };
    pub use burn_fsdp_spmd::*;
}

/// Estimates of a step's memory, traffic and time, before anything runs.
pub mod plan {
    pub use burn_fsdp_plan::*;
}

/// The transport: operations between ranks, their buffers, labels and ledgers.
pub mod collectives {
    pub use burn_fsdp_collectives::{
        Account, Buffer, BufferPool, Carried, Check, CommSpan, CommStage, Contract, CrossPart,
        ElementType, EntryState, Error, Fingerprint, FullPart, GroupId, Label, LaunchError, Ledger,
        LedgerEntry, LedgerReport, Moment, Operation, OperationCounts, OperationKind, Part,
        Pending, Processes, Received, Reduction, Role, Seal, Share, Source, Stage, Who,
        launcher_ranks, processes,
    };
}

/// The arithmetic of meshes and partitions.
pub mod mesh {
    pub use burn_fsdp_collectives::AsMesh;
    pub use burn_fsdp_mesh::{
        Axis, AxisPlacement, Cut, Error, Layout, Partition, Pattern, ReduceOp, Region, Transfer,
        transfers,
    };
}

/// The tools for tests of training runs: faults at chosen places, and counters of operations.
/// [`ProcessGroup::fake`](crate::ProcessGroup::fake) makes groups of ranks that do not exist.
pub mod testing {
    pub use burn_fsdp_collectives::{At, CommCounter, Fault, How, Tally, Unwound};
}

/// The examples of the README and of the book, compiled and run as tests.
#[cfg(doctest)]
mod pages {
    macro_rules! pages {
        ($($name:ident $file:literal),+ $(,)?) => {
            $(#[doc = include_str!(concat!("../../../", $file))] struct $name;)+
        };
    }
    pages! {
        Readme "README.md",
        GettingStarted "docs/book/src/getting-started.md",
        FromPytorch "docs/book/src/from-pytorch.md",
        FromBurnDdp "docs/book/src/from-burn-ddp.md",
        Units "docs/book/src/units.md",
        Memory "docs/book/src/memory.md",
        Precision "docs/book/src/precision.md",
        Optimizers "docs/book/src/optimizers.md",
        Adapters "docs/book/src/adapters.md",
        Checkpoints "docs/book/src/checkpoints.md",
        Compiled "docs/book/src/compiled.md",
        Certificate "docs/book/src/certificate.md",
        Debugging "docs/book/src/debugging.md",
        Devices "docs/book/src/devices.md",
    }
}
