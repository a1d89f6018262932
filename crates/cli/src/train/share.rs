//! The exchange of numbers between the ranks.

use burn_fsdp::ProcessGroup;
use burn_fsdp::collectives::Error;

/// Returns the mean of one number per rank, the same bits on every rank.
///
/// An exchange of bytes, so that it does not count among the collectives of a step.
pub(crate) fn mean(world: &ProcessGroup, label: &'static str, own: f32) -> Result<f64, Error> {
    let notes = world.exchange(label, own.to_le_bytes().to_vec())?;
    let numbers = notes
        .iter()
        .filter_map(|note| note.as_slice().try_into().ok());
    let sum: f64 = numbers
        .map(|bytes| f64::from(f32::from_le_bytes(bytes)))
        .sum();
    Ok(sum / world.size() as f64)
}

/// The values that the ranks agree on at the end of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepEnd {
    /// The mean loss, the same bits on every rank.
    pub(crate) loss: f64,
    /// True if any rank was told to stop.
    pub(crate) stop: bool,
}

/// Agrees on the mean loss and on stopping, in one exchange.
pub(crate) fn step_end(
    world: &ProcessGroup,
    own_loss: f32,
    own_stop: bool,
) -> Result<StepEnd, Error> {
    let note = [&own_loss.to_le_bytes()[..], &[u8::from(own_stop)]].concat();
    let notes = world.exchange("end of step", note)?;
    let losses = notes.iter().filter_map(|note| note.first_chunk().copied());
    let sum: f64 = losses
        .map(|bytes| f64::from(f32::from_le_bytes(bytes)))
        .sum();
    Ok(StepEnd {
        loss: sum / world.size() as f64,
        stop: notes.iter().any(|note| note.last() == Some(&1)),
    })
}
