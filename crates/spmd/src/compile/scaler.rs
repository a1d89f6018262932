//! The loss scale across steps.

use burn::tensor::TensorData;
use burn_fsdp_mesh::{LossScalerState, LossScaling};

/// The loss scale of a compiled step, and the outcome of its last step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaler {
    pub(super) scaling: LossScaling,
    pub(super) state: LossScalerState,
    /// The outcome of the last step.
    pub(super) last: Last,
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// All gradients were finite.
    Taken,
    /// A gradient overflowed, so the scale was reduced.
    Skipped,
    /// A gradient overflowed, and no smaller scale is left.
    Vanished,
}

impl Scaler {
    pub(super) fn new(scaling: LossScaling) -> Self {
        Self {
            scaling,
            state: scaling.begin(),
            last: Last::Taken,
        }
    }

    /// Returns the loss scale as the tensor that the graph reads.
    pub(super) fn factor(&self) -> TensorData {
        TensorData::new(vec![self.state.scale as f32], [1])
    }
}
