//! The exchange of numbers between the ranks.

use burn_fsdp::ProcessGroup;
use burn_fsdp::internals::collectives::Error;

/// A sum of values, and their number.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sum {
    sum: f64,
    count: u64,
}

impl Sum {
    /// Adds `count` values whose mean is `mean`.
    pub(crate) fn add(&mut self, mean: f32, count: usize) {
        self.sum += f64::from(mean) * count as f64;
        self.count += count as u64;
    }

    fn from_note(note: &[u8]) -> Option<Self> {
        let (sum, count) = note.split_first_chunk()?;
        Some(Self {
            sum: f64::from_le_bytes(*sum),
            count: u64::from_le_bytes(count.try_into().ok()?),
        })
    }
}

/// Returns the mean of the values of all ranks, with the same bits on every rank.
///
/// This exchanges bytes, so it does not count as one of a step's collectives.
pub(crate) fn mean(world: &ProcessGroup, label: &'static str, own: Sum) -> Result<f64, Error> {
    let note = [own.sum.to_le_bytes(), own.count.to_le_bytes()].concat();
    let notes = world.exchange(label, note)?;
    let sums: Vec<_> = notes
        .iter()
        .filter_map(|note| Sum::from_note(note))
        .collect();
    let sum: f64 = sums.iter().map(|sum| sum.sum).sum();
    let count: u64 = sums.iter().map(|sum| sum.count).sum();
    Ok(sum / count as f64)
}

/// The values on which ranks agree at the end of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepEnd {
    /// The mean loss, with the same bits on every rank.
    pub(crate) loss: f64,
    /// True if any rank was asked to stop.
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
