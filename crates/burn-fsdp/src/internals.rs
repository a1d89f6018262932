//! Internals of the compiler, plans, collectives and checkpoints, rarely used parts of the other modules, and test
//! tools.
//!
//! **This module has no stability guarantee: any release may change or remove anything in it.** The command, the
//! benchmarks and the tests of this repository use it. An ordinary program does not need it. It also has types that
//! public functions accept or return but that programs seldom name.
//!
//! Most modules complete the stable module of the same name. [`collectives`], [`mesh`], [`device`] and [`testing`]
//! exist only here.

/// Rarely used parts of a [`ShardPolicy`](crate::ShardPolicy), sharding of values that each rank reads, activations on
/// the host, a wrapper that holds a module and its policy, and the error of the eager engine.
pub mod sharding {
    pub use burn_fsdp_shard::{
        Audit, BaseBits, DivideFactors, Error, FullGradient, FullyShardedDataParallel, InitialPart,
        ParameterShard, PendingTensors, ReduceGroup, ReductionStage, ShardFileError, UnitGather,
        UnitReduction, fully_shard_from, offload_activations,
    };
}

/// The types in reports, and more reports.
pub mod inspect {
    pub use burn_fsdp_shard::{
        LiveBytes, Memory, Order, Pinned, Staged, Transfers, UnitHandle, UnitMemory, UnitPlan,
        UnitState, Unsharding, WrapPlan, check_names, dummy_forward, num_audited, order, param_id,
        parameter_paths, reset_peak, stand_in_bytes, trim, unused_units,
    };
}

/// The tensors of a module's state, and conversions from and to plain modules and optimizers.
pub mod state {
    pub use burn_fsdp_glue::optimizer_whole::{shard_optimizer, unsharded_optimizer};
    pub use burn_fsdp_shard::{
        FullTensor, LocalId, LocalPart, LocalTensor, RecordedTensor, cast_buffers, full_state,
        local_ids, local_state, recorded_state, renew_stand_ins, reset, settle_ids, unsharded,
    };
}

/// Steps in backward, states with checksums, gradients by unit, whole gradients, and the states of optimizers and loss
/// scalers.
pub mod optim {
    pub use burn_fsdp_shard::{
        Clipped, LossScalerState, LowBitState, NonFinite, SealedOptimizer, SealedState,
        UnitGradients, backward_and_step, check_elementwise_once, check_same_optimizer,
        full_gradients, grad_norm, gradients_by_unit, owner_groups, params_with_gradient,
        shard_gradients,
    };
}

/// The format of steps, plans for writing and reading them, storage, commit and consolidation, and partial snapshots.
pub mod checkpoint {
    pub use burn_fsdp_checkpoint::{
        Alone, Assignment, BackgroundSaver, BoxError, Check, Checksums, Committed, Consolidated,
        ConsolidationConfig, DataPosition, Dtype, Error, Existing, ExpectedTensor, Extra,
        FORMAT_VERSION, FileEntry, FileRange, Index, InspectedFile, InspectedTensor, Inspection,
        Limits, LossScale, NewestGood, PartBytes, PartEntry, PlainTensor, Progress, ReadPlan,
        Receipt, Rendezvous, SaveRequest, Saved, Skipped, Snapshot, Source, Staging, Step,
        TensorEntry, TensorKind, TensorSpec, ThreadRendezvous, Ticket, Totals, TrainingState,
        Verification, WritePlan, check_outside_steps, consolidate_to_file, consolidate_to_folder,
        save as save_step, storage, write_shard,
    };
    pub use burn_fsdp_glue::blocking::Resumed;
    pub use burn_fsdp_glue::checkpointer::{NotFiniteTensor, Offered, SaveRemark};
    pub use burn_fsdp_glue::error::CheckpointError;
    pub use burn_fsdp_glue::rendezvous::GroupRendezvous;
    pub use burn_fsdp_glue::restore::{restore_matching, restore_model, restore_training};
    pub use burn_fsdp_glue::scaler::{loss_scale, restore_scaler};
    pub use burn_fsdp_glue::snapshot::{TrainingSnapshot, snapshot_matching};
}

/// The stages of the compiler, its graph and passes, custom operations, and certificates.
pub mod compile {
    pub use burn_fsdp_certificate::{
        Certificate, certify, certify_at, compile_from, compile_on, compile_with, prove,
    };
    pub use burn_fsdp_glue::compiled_restore::restore_compiled_matching;
    pub use burn_fsdp_glue::compiled_snapshot::snapshot_compiled_matching;
    pub use burn_fsdp_spmd::{
        BackendIr, CustomOpIr, CustomOperation, CustomOperations, DataParallel, DoraAdapter,
        DumpError, Error, GRAD_NORM, GraphDump, HalfProducts, HandleKind, IdleState, IdleTensor,
        LazyDora, LazyLora, Loss, Lower, Lowered, Lowering, MoveError, OptimizerState, OptionError,
        Override, OverrideError, PassHook, ProofError, ScaleError, ShardSpec, StepGraphs, Summary,
        cast_floats, graph, kernels, lower, passes, place, run, trace,
    };
}

/// Plans of graphs and of jobs: memory, traffic, time, and the units to recompute for a memory budget.
pub mod plan {
    pub use burn_fsdp_plan::{
        Advice, BudgetError, Bytes, Category, Checkpointing, Duration, Estimate, Fitted, Flops,
        Job, Link, Machine, Moment, Plan, Precision, ProcessBytes, Size, Stop, Tally, TimePlan,
        TracedEstimate, Traffic, Transformer, advise, fit,
    };
}

/// The transport: operations between ranks, their buffers, labels and ledgers.
pub mod collectives {
    pub use burn_fsdp_collectives::{
        Account, Buffer, BufferPool, Carried, CommSpan, CommStage, Contract, CrossPart,
        ElementType, EntryState, Error, Fingerprint, FullPart, GroupId, Label, LaunchError, Ledger,
        LedgerEntry, LedgerReport, Moment, Operation, OperationCounts, OperationKind, Part,
        Pending, Processes, Received, Reduction, Role, Seal, Share, Source, Stage, Who, engine,
        processes,
    };
}

/// The arithmetic of meshes and partitions.
pub mod mesh {
    pub use burn_fsdp_collectives::AsMesh;
    pub use burn_fsdp_mesh::{
        Axis, AxisPlacement, Error, Layout, Partition, Pattern, ReduceOp, Region, Transfer,
        transfers,
    };
}

/// Step outputs in Burn's own loop, as sent between processes.
#[cfg(feature = "train")]
pub mod train {
    pub use burn_fsdp_train::{CompiledOutput, Parcel, Portable};
}

/// The error of device names.
pub mod device {
    pub use burn_fsdp_glue::device_name::DeviceNameError;
}

/// Test tools: injected faults and operation counters. [`ProcessGroup::fake`](crate::ProcessGroup::fake) creates groups
/// whose other ranks do not exist.
pub mod testing {
    pub use burn_fsdp_collectives::{At, CommCounter, Fault, How, Tally, Unwound};
}
