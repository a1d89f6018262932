//! Fully sharded data-parallel training for [Burn](https://burn.dev). Parameters, gradients and optimizer state are
//! kept in shards, and the full weights of a unit exist only during its own forward and backward. Model code, optimizer
//! and training loop stay unchanged.
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
//!     // Rejects optimizers that compute with whole tensors, such as Muon, or any that clip by norm.
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
//! The crate root has the items that every training run uses: ranks ([`launch`], [`ProcessGroup`], [`ProcessMesh`],
//! [`Mesh`]), sharding ([`fully_shard`], [`ShardPolicy`]), the step ([`backward`], [`catch`], [`no_sync`],
//! [`recompute`], [`clip_grad_norm`], [`LossScaler`]), checkpoints ([`save`], [`resume`], [`Checkpointer`]), and one
//! [`Error`] for all of it. Everything else is in a module:
//!
//! - [`sharding`]: where shards may begin, and evaluation in which ranks may run different units.
//! - [`inspect`]: reports on units, memory and communication.
//! - [`state`]: whole parameters, records, running states, and checks that ranks agree.
//! - [`optim`]: optimizers of sharded modules, and a check that an optimizer can work on shards.
//! - [`checkpoint`]: steps on disk, snapshots and restoring.
//! - [`compile`]: a whole train step as one graph, which uses the same checkpoints.
//! - [`plan`]: a compiled step's memory, planned before it runs.
//! - [`train`]: Burn's own training loop, `SupervisedTraining`, over sharded modules (feature `train`).
//! - [`allocator`]: keeps freed host memory for reuse.
//!
//! [`internals`] is not part of the stable interface.

pub mod allocator;
mod inputs;
pub mod internals;
mod recompute;

pub use burn_fsdp_collectives::{Check, LaunchConfig, ProcessGroup, ProcessMesh, launcher_ranks};
pub use burn_fsdp_glue::blocking::{resume, save};
pub use burn_fsdp_glue::checkpointer::Checkpointer;
pub use burn_fsdp_glue::device_name::DeviceName;
pub use burn_fsdp_glue::error::Error;
pub use burn_fsdp_mesh::{Mesh, Placement};
pub use burn_fsdp_shard::{
    Clip, LossScaler, Precision, ShardPolicy, Strategy, backward, catch, clip_grad_norm,
    fully_shard, launch, no_sync, replicate,
};
pub use inputs::cast_input;
pub use recompute::recompute;

/// Where the shards of a [`ShardPolicy`] may begin, and evaluation in which ranks may run different units.
pub mod sharding {
    pub use burn_fsdp_shard::{Cut, evaluate};
}

/// Reports on a module's units, memory and communication.
pub mod inspect {
    pub use burn_fsdp_shard::{auto_units, memory, num_params, units, wrap_plan};
}

/// Access to the state of a sharded module: whole parameters, records, one rank's parts, running states.
pub mod state {
    pub use burn_fsdp_shard::{
        Agreement, BufferSync, WriteBack, check_agreement, into_record, load_local_state,
        moving_average, summon_full_params, sync_buffers,
    };
}

/// Optimizers of sharded modules: a check that an optimizer can work on shards, state in files or in fewer bits, and
/// the norms for [`Clip`].
pub mod optim {
    pub use burn_fsdp_glue::file_backed::FileBackedOptimizer;
    pub use burn_fsdp_shard::{LowBitOptimizer, Norm, StateFormat, check_elementwise};
}

/// Steps on disk, snapshots of sharded models, and restoring.
///
/// [`save`](save()), [`resume`] and [`Checkpointer`] are enough for most programs.
pub mod checkpoint {
    pub use burn_fsdp_checkpoint::Checkpoints;
    pub use burn_fsdp_glue::restore::restore;
    pub use burn_fsdp_glue::snapshot::snapshot;
}

/// Compiles a whole train step into one graph, and converts state from and to sharded modules.
pub mod compile {
    pub use burn_fsdp_certificate::compile;
    pub use burn_fsdp_glue::blocking::{resume_compiled, save_compiled};
    pub use burn_fsdp_glue::compiled_restore::{load_compiled, restore_compiled};
    pub use burn_fsdp_glue::compiled_snapshot::snapshot_compiled;
    pub use burn_fsdp_spmd::passes::schedule::Options;
    pub use burn_fsdp_spmd::{
        Batch, BatchMapper, CompiledStep, Evaluation, Expand, LossScaling, Mode, OptimizerGroups,
        named_activation,
    };
}

/// The memory of a compiled step, planned before it runs.
pub mod plan {
    pub use burn_fsdp_plan::MemoryPlan;
}

/// Burn's own training loop over sharded modules: `SupervisedTraining` with its metrics, dashboard, learning-rate
/// schedules, early stopping, gradient accumulation and checkpoints.
#[cfg(feature = "train")]
pub mod train {
    pub use burn_fsdp_train::{FullySharded, Lent};
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
        Port "docs/book/src/port.md",
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
