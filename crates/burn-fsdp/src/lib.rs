//! Fully sharded data-parallel training for [Burn](https://burn.dev): parameters, gradients and
//! optimizer state live in shards; the full weights of a unit exist only around its own forward
//! and backward. Model code, optimizer and training loop stay as they are.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_fsdp::{
//!     Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, backward, check_elementwise,
//!     fully_shard, launch,
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
//! # What is where
//!
//! - [`fully_shard`] and [`ShardPolicy`]: what becomes a unit, and when its full weights go.
//! - [`FullyShardedDataParallel`]: the same as a wrapper with methods; [`auto_units`] proposes units.
//! - [`clip_grad_norm`], [`LossScaler`], [`check_elementwise`], [`FileBackedOptimizer`]: between
//!   backward and the optimizer.
//! - [`summon_full_params`], [`full_state`], [`into_record`], [`sync_buffers`], [`check_agreement`]: whole
//!   parameters, running states, and whether ranks agree. [`param_id`], [`settle_ids`]: ids.
//! - [`save`], [`resume`]: checkpoints, for any number of ranks, in a call each; [`Checkpointer`]: saves while
//!   the training goes on; [`snapshot`], [`restore`] and [`steps`] for everything else.
//! - [`snapshot_compiled`], [`restore_compiled`], [`load_compiled`]: the same for compiled steps ([`spmd`]), so that
//!   a model moves between the engines.
//! - [`backward`], [`catch`]: errors of other ranks as values instead of hangs.
//! - [`wrap_plan`], [`memory()`], [`order`]: what was cut, what it costs, what is communicated.
//! - [`launch`], [`ProcessGroup`], [`ProcessMesh`], [`Mesh`]: ranks and how they are laid out.

mod blocking;
mod checkpointer;
mod compiled;
mod dtype;
mod error;
mod file_backed;
mod optimizer_record;
mod rendezvous;
mod restore;
mod scaler;
mod snapshot;

/// Steps on disk: format, plans, storage, commit, consolidation.
pub use burn_fsdp_checkpoint as steps;

pub use blocking::{Resumed, resume, save};
/// The transport below: buffers, process groups, collectives.
pub use burn_fsdp_collectives as collectives;
pub use burn_fsdp_collectives::{
    At, CommCounter, Fault, LaunchConfig, LaunchError, OperationCounts, OperationKind,
    ProcessGroup, ProcessMesh, Tally, Unwound, launch,
};
/// Meshes, placements and partition arithmetic.
pub use burn_fsdp_mesh as mesh;
pub use burn_fsdp_mesh::{Mesh, Partition, Placement};
pub use burn_fsdp_shard::*;
pub use checkpointer::{Checkpointer, NotFiniteTensor, Offered, SaveRemark};
pub use compiled::{load_compiled, restore_compiled, snapshot_compiled};
pub use error::CheckpointError;
pub use file_backed::FileBackedOptimizer;
pub use rendezvous::GroupRendezvous;
pub use restore::{restore, restore_matching, restore_model};
pub use scaler::{loss_scale, restore_scaler};
pub use snapshot::{TrainingSnapshot, snapshot};

/// The compiler: a whole train step as one graph, planned and run.
pub mod spmd {
    pub use burn_fsdp_spmd::*;

    /// What a step will cost, before anything runs.
    pub use burn_fsdp_plan as plan;
}

/// The examples of the README, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
