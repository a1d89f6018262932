//! The state other than tensors that lets a run continue as if it had never stopped.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The state of a training run other than its tensors. Numbers are restored bit for bit.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Number of completed optimizer steps, which is also the step number in the folder's name.
    pub step: u64,
    /// Seed of the run's random numbers.
    pub seed: u64,
    /// Position of the run in its data.
    pub data: DataPosition,
    /// State of the loss scaler, if there is one.
    pub loss_scale: Option<LossScale>,
    /// The learning-rate schedule: its configuration and position.
    pub learning_rate: Value,
    /// Hyperparameters of the optimizer and of its parameter groups.
    pub optimizer: Value,
    /// Any other state, by name.
    pub sections: Map<String, Value>,
}

/// The position of a run in its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// Completed passes over the data.
    pub epoch: u64,
    /// Samples completed in the current pass over the data, on all ranks.
    pub sample: u64,
}

/// State of a dynamic loss scaler.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The factor that multiplies the loss: a positive number in the range of `f32`.
    pub scale: f64,
    /// Steps since the factor last changed.
    pub good_steps: u64,
}
