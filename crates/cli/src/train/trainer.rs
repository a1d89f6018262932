//! The interface of the eager engine and of a compiled step to the loop around them.

use std::time::Instant;

use burn_fsdp::LossScaler;
use burn_fsdp::checkpoint::{Step, TrainingSnapshot};
use serde_json::Value;

use crate::adapters::Adapters;
use crate::error::RankError;

/// One rank's model and optimizer. All ranks call the same methods in the same order.
pub(crate) trait Trainer {
    /// Trains one step on this rank's rows, and returns the loss before it, of these rows or of all.
    fn step(&mut self, step: usize) -> Result<f32, RankError>;

    /// Trains one step as [`step`](Self::step) does, and returns its events of a Chrome trace as
    /// well, with times since `origin`.
    fn traced_step(&mut self, step: usize, origin: Instant)
    -> Result<(f32, Vec<Value>), RankError>;

    /// Returns the maximum of the bytes of full tensors at once in the last step.
    fn unsharded_peak(&self) -> Result<usize, RankError>;

    /// Returns the bytes that collectives have copied from a device to the host so far, and to a device. None where
    /// the host computes.
    fn staged(&self) -> Result<[usize; 2], RankError> {
        Ok([0, 0])
    }

    /// Computes the mean loss on the held-out text, or `None` without any.
    fn evaluate(&mut self) -> Result<Option<f64>, RankError>;

    /// Returns the norm of the last step's gradients, if it is not finite and the run is to stop at that. The step was
    /// not taken, or has left values that are not finite.
    fn norm_not_finite(&self) -> Option<f64> {
        None
    }

    /// Copies the state that is to be saved.
    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError>;

    /// Returns the loss scaler, if there is one.
    fn scaler(&self) -> Option<&LossScaler> {
        None
    }

    /// Returns the adapters that are saved in place of the whole model, if they alone are trained.
    fn adapters(&self) -> Option<&Adapters> {
        None
    }

    /// Loads the state of a saved step.
    fn resume(&mut self, saved: &Step) -> Result<(), RankError>;

    /// Returns the bytes of parameters and optimizer that this rank holds.
    fn state_bytes(&self) -> Result<usize, RankError>;

    /// Returns remarks on the division of the model.
    fn warnings(&self) -> Result<Vec<String>, RankError>;

    /// Returns the units that are computed again in backward so that a step stays within its budget of memory.
    fn recomputed_units(&self) -> &[String] {
        &[]
    }

    /// Generates the sample text with the trained model; `None` if the run ends without one.
    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError>;
}
