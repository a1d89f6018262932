//! What trains: the eager engine or a compiled step, alike for the loop around them.

use std::time::Instant;

use burn_fsdp::LossScaler;
use burn_fsdp::checkpoint::{Step, TrainingSnapshot};
use serde_json::Value;

use crate::error::RankError;

/// One rank's model and optimizer. All ranks call the same methods in the same order.
pub(crate) trait Trainer {
    /// Trains one step on this rank's rows, and returns the loss before it, of these rows or of all.
    fn step(&mut self, step: usize) -> Result<f32, RankError>;

    /// The same, and what it did when, as events of a Chrome trace with times since `origin`.
    fn traced_step(&mut self, step: usize, origin: Instant)
    -> Result<(f32, Vec<Value>), RankError>;

    /// The most bytes of full tensors at once in the last step.
    fn unsharded_peak(&self) -> Result<usize, RankError>;

    /// The mean loss on the held-out text, or `None` without any.
    fn evaluate(&mut self) -> Result<Option<f64>, RankError>;

    /// The norm of the last step's gradients, if it is not finite and the step was not taken for that.
    fn norm_not_finite(&self) -> Option<f64> {
        None
    }

    /// What is to be saved now.
    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError>;

    /// What scales the loss, if anything does.
    fn scaler(&self) -> Option<&LossScaler> {
        None
    }

    /// Takes the state of a saved step.
    fn resume(&mut self, saved: &Step) -> Result<(), RankError>;

    /// Bytes of parameters and optimizer that this rank holds.
    fn state_bytes(&self) -> Result<usize, RankError>;

    /// Remarks on how the model is divided.
    fn warnings(&self) -> Result<Vec<String>, RankError>;

    /// Text that the trained model makes up, or `None` without text to go on from.
    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError>;
}
