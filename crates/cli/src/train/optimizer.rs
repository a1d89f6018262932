//! The optimizer, with its state in memory or in files.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn_fsdp::internals::checkpoint::{
    Step, TrainingSnapshot, restore_training, snapshot_matching,
};
use burn_fsdp::optim::{FileBackedOptimizer, check_elementwise};
use burn_fsdp::{Mesh, catch};

use crate::error::RankError;
use crate::train::config::TrainConfig;

/// Returns the optimizer without state. It keeps checksums of the state that it creates.
pub(crate) fn fresh(config: &TrainConfig) -> ModuleOptimizer {
    config.optimizer.sealed().into()
}

/// The optimizer, by the location of its state.
pub(crate) enum Optimizer {
    /// An optimizer with its state in memory.
    InMemory(Box<ModuleOptimizer>),
    /// An optimizer with its state in files. One unit's state is in memory at a time.
    InFiles(FileBackedOptimizer),
}

impl Optimizer {
    /// Creates the optimizer for a sharded model, and checks that it supports shards.
    pub(crate) fn new<M: Module>(
        config: &TrainConfig,
        model: &M,
        rank: usize,
    ) -> Result<Self, RankError> {
        let optimizer = fresh(config);
        check_elementwise(model, &optimizer)?;
        Ok(match &config.sharding.offload {
            None => Self::InMemory(Box::new(optimizer)),
            Some(folder) => Self::InFiles(FileBackedOptimizer::new(optimizer, folder, rank)?),
        })
    }

    /// Returns true if the state is in memory.
    pub(crate) fn is_in_memory(&self) -> bool {
        matches!(self, Self::InMemory(_))
    }

    /// Takes a snapshot of the model and of the optimizer state.
    pub(crate) fn snapshot<M: Module>(
        &self,
        model: &M,
        mesh: &Mesh,
        is_saved: impl Fn(&str) -> bool,
    ) -> Result<TrainingSnapshot, RankError> {
        Ok(match self {
            Self::InMemory(optimizer) => {
                snapshot_matching(model, optimizer, mesh, "shard", is_saved)?
            }
            Self::InFiles(optimizer) => optimizer.snapshot(model, mesh, "shard", is_saved)?,
        })
    }

    /// Restores the optimizer state from a step, and returns the model with the step's parameters.
    pub(crate) fn restore<M: Module>(
        &mut self,
        config: &TrainConfig,
        model: M,
        step: &Step,
        is_saved: impl Fn(&str) -> bool,
    ) -> Result<M, RankError> {
        match self {
            Self::InMemory(optimizer) => {
                let (model, restored) = restore_training(model, fresh(config), step, is_saved)?;
                **optimizer = restored;
                Ok(model)
            }
            Self::InFiles(optimizer) => Ok(optimizer.restore_step(model, step, is_saved)?),
        }
    }

    /// Takes a step, and returns the model after it.
    pub(crate) fn step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, RankError> {
        Ok(match self {
            Self::InMemory(optimizer) => catch(|| optimizer.step(lr, model, gradients))?,
            Self::InFiles(optimizer) => catch(|| optimizer.step(lr, model, gradients))??,
        })
    }
}
