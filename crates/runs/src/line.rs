//! A line of a metrics file.

use serde::{Deserialize, Deserializer, Serialize};

/// The metrics of one training step: a line of the file that `train --metrics` writes, as a JSON object.
///
/// Only `step` and `loss` are required, because older files lack some of the others. Unknown keys are ignored. JSON has
/// no numbers that are not finite, so these are written as null.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Number of the step, counted from 0, including unmeasured steps.
    pub step: u64,
    /// Mean loss over the ranks, in nats per token; NaN if it was not finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// Tokens per second of all ranks together, by rank 0's clock.
    #[serde(default)]
    pub tokens_per_s: Option<f64>,
    /// Duration of the step in milliseconds.
    #[serde(default)]
    pub step_ms: Option<f64>,
    /// Learning rate.
    #[serde(default)]
    pub lr: Option<f64>,
    /// True if the report's times include the step.
    #[serde(default = "yes")]
    pub measured: bool,
    /// Loss on held-out text after this step, if it was evaluated.
    #[serde(default)]
    pub eval_loss: Option<f64>,
    /// Global norm of the gradients before clipping, if they are clipped.
    #[serde(default)]
    pub grad_norm: Option<f64>,
    /// Number of ranks that trained the step.
    #[serde(default)]
    pub ranks: Option<u64>,
    /// Operations of the model per second, on all ranks together, without recomputation.
    #[serde(default)]
    pub flops_per_s: Option<f64>,
    /// Resident bytes of rank 0's process after the step.
    #[serde(default)]
    pub rss_bytes: Option<u64>,
    /// Peak bytes of full tensors on rank 0 during the step.
    #[serde(default)]
    pub unsharded_bytes: Option<u64>,
}

fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn yes() -> bool {
    true
}
