//! Numbers that the ranks tell each other.

use burn_fsdp::ProcessGroup;
use burn_fsdp::collectives::Error;

/// The mean of one number per rank, the same bits on every rank.
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

/// Rank 0's byte, on every rank.
pub(crate) fn byte_of_rank_0(
    world: &ProcessGroup,
    label: &'static str,
    own: u8,
) -> Result<u8, Error> {
    let notes = world.exchange(label, vec![own])?;
    Ok(notes
        .first()
        .and_then(|note| note.first())
        .copied()
        .unwrap_or(own))
}
