//! The optimizer, with its state in memory or in files.

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn_fsdp::catch;
use burn_fsdp::optim::{FileBackedOptimizer, check_elementwise};
use burn_fsdp_models::Gpt;

use crate::error::RankError;
use crate::train::config::TrainConfig;

/// AdamW.
pub(crate) enum Optimizer {
    /// In memory.
    InMemory(Box<ModuleOptimizer>),
    /// In files, a unit at a time in memory.
    InFiles(FileBackedOptimizer),
}

impl Optimizer {
    /// Makes it for a sharded model, having checked that it may be used with shards.
    pub(crate) fn new(config: &TrainConfig, model: &Gpt, rank: usize) -> Result<Self, RankError> {
        let optimizer = config.optimizer.init();
        check_elementwise(model, &optimizer)?;
        Ok(match &config.sharding.offload {
            None => Self::InMemory(Box::new(optimizer)),
            Some(folder) => Self::InFiles(FileBackedOptimizer::new(optimizer, folder, rank)?),
        })
    }

    /// Values that it keeps in memory for each parameter.
    pub(crate) fn values_in_memory(&self) -> usize {
        match self {
            Self::InMemory(_) => 2,
            Self::InFiles(_) => 0,
        }
    }

    /// The model after a step.
    pub(crate) fn step(
        &mut self,
        lr: f64,
        model: Gpt,
        gradients: GradientsParams,
    ) -> Result<Gpt, RankError> {
        Ok(match self {
            Self::InMemory(optimizer) => catch(|| optimizer.step(lr, model, gradients))?,
            Self::InFiles(optimizer) => catch(|| optimizer.step(lr, model, gradients))??,
        })
    }
}
