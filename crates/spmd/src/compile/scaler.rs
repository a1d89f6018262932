//! The scale of a loss, from step to step.

use burn::tensor::TensorData;
use burn_fsdp_mesh::{LossScalerState, LossScaling};

/// The scale of the losses of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaler {
    pub(super) scaling: LossScaling,
    pub(super) state: LossScalerState,
    /// True if gradients of the last step have overflowed.
    pub(super) has_skipped: bool,
}

impl Scaler {
    pub(super) fn new(scaling: LossScaling) -> Self {
        Self {
            scaling,
            state: scaling.begin(),
            has_skipped: false,
        }
    }

    /// Returns the factor of the loss, as the graph reads it.
    pub(super) fn factor(&self) -> TensorData {
        TensorData::new(vec![self.state.scale as f32], [1])
    }
}
