//! Saving a snapshot as a step.

use std::path::Path;

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::{
    GroupRendezvous, SaveRequest, TrainingSnapshot, TrainingState, save_step,
};
use burn_fsdp::{Error, ProcessGroup};

/// Saves a snapshot as step `step` in `folder`. Collective over `world`.
pub(crate) fn save_taken(
    folder: &Path,
    world: ProcessGroup,
    mut taken: TrainingSnapshot,
    step: u64,
) -> Result<(), Error> {
    let training = TrainingState {
        step,
        optimizer: taken.optimizer,
        ..TrainingState::default()
    };
    let request = SaveRequest::new(taken.plan, training);
    let mut meet = GroupRendezvous::new(world);
    save_step(
        &Checkpoints::new(folder),
        &request,
        &mut taken.snapshot,
        &mut meet,
    )?;
    Ok(())
}
