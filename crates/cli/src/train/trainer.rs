//! The interface of the eager engine and of compiled steps to the training loop.

use std::time::Instant;

use burn_fsdp::LossScaler;
use burn_fsdp::internals::checkpoint::{Step, TrainingSnapshot};
use serde_json::Value;

use crate::adapters::Adapters;
use crate::error::RankError;

/// One rank's model and optimizer. All ranks call the same methods in the same order.
pub(crate) trait Trainer {
    /// Trains one step on this rank's rows. Returns the mean loss before the update, over these rows or over all rows.
    fn step(&mut self, step: usize) -> Result<f32, RankError>;

    /// Trains one step like [`step`](Self::step), and also returns its Chrome trace events, with times since `origin`.
    fn traced_step(&mut self, step: usize, origin: Instant)
    -> Result<(f32, Vec<Value>), RankError>;

    /// Returns the peak bytes of full tensors in the last step.
    fn unsharded_peak(&self) -> Result<usize, RankError>;

    /// Returns the bytes that collectives have copied so far from a device to the host, and to a device. Both are zero
    /// if the host computes.
    fn staged(&self) -> Result<[usize; 2], RankError>;

    /// Computes the mean loss on the held-out text; `None` if there is none.
    fn evaluate(&mut self) -> Result<Option<f64>, RankError>;

    /// Returns the gradient norm of the last step before clipping; `None` without clipping, or if a scaled loss
    /// overflowed. After a norm that is not finite, the update was skipped, or produced non-finite values.
    fn grad_norm(&self) -> Option<f64>;

    /// Copies the state to be saved.
    fn snapshot(&mut self) -> Result<TrainingSnapshot, RankError>;

    /// Returns the loss scaler, if there is one.
    fn scaler(&self) -> Option<&LossScaler> {
        None
    }

    /// Returns the adapters that are saved instead of the whole model, if nothing else is trained.
    fn adapters(&self) -> Option<&Adapters> {
        None
    }

    /// Loads the state of a saved step.
    fn resume(&mut self, saved: &Step) -> Result<(), RankError>;

    /// Returns the bytes of parameters and optimizer state on this rank.
    fn state_bytes(&self) -> Result<usize, RankError>;

    /// Returns warnings about the sharding of the model.
    fn warnings(&self) -> Result<Vec<String>, RankError>;

    /// Returns the units that are recomputed in backward to keep a step within its memory budget.
    fn recomputed_units(&self) -> &[String] {
        &[]
    }

    /// Returns the method of products in `bf16`; `None` if Burn computes the products.
    fn half_products(&self) -> Option<String> {
        None
    }

    /// Generates the sample text with the trained model; `None` if no sample is requested.
    fn sample(&mut self) -> Result<Option<Vec<u8>>, RankError>;
}
