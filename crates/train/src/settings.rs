//! The user's settings for a sharded training run.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_fsdp_collectives::LaunchConfig;
use burn_fsdp_shard::{Clip, LossScaler, ShardPolicy};

/// The engine of a training run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Each rank computes with the model, on its device.
    Eager,
    /// Each rank computes with a compiled step, which creates its own parameters. The model stays on the host.
    Compiled,
}

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) ranks: LaunchConfig,
    /// The number of replicas, each sharded over the same number of ranks.
    pub(crate) replicas: usize,
    /// The user's policy, if any.
    pub(crate) policy: Option<ShardPolicy>,
    pub(crate) clip: Option<Clip>,
    /// The scaler at the first step, if losses are scaled.
    pub(crate) scaler: Option<LossScaler>,
    /// The device of each rank, in order; empty for the model's device.
    pub(crate) devices: Vec<Device>,
    /// The engine that computes.
    pub(crate) engine: Engine,
    /// The folder for files in transit to and from checkpoints, if the user named one.
    pub(crate) scratch: Option<PathBuf>,
}
