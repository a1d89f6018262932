//! The state of a loss scaler in saved steps.

use burn_fsdp_checkpoint::{LossScale, Step};
use burn_fsdp_shard::{LossScaler, LossScalerState};

/// Returns the state of a loss scaler, for
/// [`TrainingState::loss_scale`](burn_fsdp_checkpoint::TrainingState::loss_scale).
pub fn loss_scale(scaler: &LossScaler) -> LossScale {
    let state = scaler.state();
    LossScale {
        scale: state.scale,
        good_steps: state.growth_tracker.into(),
    }
}

/// Returns a loss scaler with the state that it had when `step` was saved, or unchanged if the loss was not scaled.
#[must_use]
pub fn restore_scaler(scaler: LossScaler, step: &Step) -> LossScaler {
    match saved_scale(step) {
        Some(state) => scaler.restored(state),
        None => scaler,
    }
}

/// Returns the loss scale of a saved step, if it has one.
pub(crate) fn saved_scale(step: &Step) -> Option<LossScalerState> {
    let saved = step.index().training.loss_scale?;
    Some(LossScalerState {
        scale: saved.scale,
        growth_tracker: u32::try_from(saved.good_steps).unwrap_or(u32::MAX),
    })
}
