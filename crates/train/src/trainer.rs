//! The part of a rank's loop that depends on the engine.

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::train::{InferenceStep, LearnerModel, TrainStep};

use crate::scratch::Scratch;
use crate::staging::Staged;
use burn_fsdp_glue::error::Error;

/// A model that one of the engines trains. All functions are collective.
pub(crate) trait Trainer<M: LearnerModel> {
    /// Runs a batch's forward and backward. `weight` is the factor of its gradients. Returns the batch's output, unless
    /// [`step`](Self::step) returns it.
    fn run(
        &mut self,
        batch: <M as TrainStep>::Input,
        weight: f64,
    ) -> Result<Option<<M as TrainStep>::Output>, Error>;

    /// Runs the optimizer on the sum of the gradients since the last step. Returns the outputs that
    /// [`run`](Self::run) has not returned, in the order of the batches.
    fn step(&mut self, rates: ModuleLearningRate) -> Result<Vec<<M as TrainStep>::Output>, Error>;

    /// Prepares the model for a validation.
    fn begin_validation(&mut self) -> Result<(), Error>;

    /// Runs a batch of a validation. `weight` is not 1 if the ranks' batches have different numbers of items.
    fn validate(
        &mut self,
        batch: <M as InferenceStep>::Input,
        weight: f64,
    ) -> Result<<M as InferenceStep>::Output, Error>;

    /// Releases what [`begin_validation`](Self::begin_validation) has prepared.
    fn end_validation(&mut self);

    /// Gathers a checkpoint's contents into files on rank 0; other ranks have no files.
    fn staged(&mut self, files: Option<Scratch>) -> Result<Option<Staged>, Error>;
}
