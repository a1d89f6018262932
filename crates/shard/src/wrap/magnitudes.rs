//! The initial magnitudes of adapters: the norms of the columns of the weights.

use burn::tensor::{Tensor, TensorData};

use crate::error::Error;
use crate::unit::Unit;

/// Returns the norms of the columns of the matrix in `slot`, of which this rank holds the flat `part`. Collective.
///
/// No rank needs the whole matrix: each adds up the squares in its part.
pub(super) fn norms(
    unit: &Unit,
    slot: usize,
    columns: usize,
    part: &Tensor<1>,
) -> Result<TensorData, Error> {
    let slot = &unit.slots[slot];
    let group = &unit.groups.shard;
    // Of several copies of the whole matrix, only the first counts.
    let range = if slot.is_gathered() || group.rank() == 0 {
        slot.held_range(group.rank())
    } else {
        0..0
    };
    let part = part.clone().into_data().convert::<f32>();
    let mut squares = vec![0_f64; columns];
    for (index, value) in range.zip(part.iter::<f32>()) {
        squares[index % columns] += f64::from(value).powi(2);
    }
    let label = format!("{} norms of columns", slot.path);
    let bytes = squares.into_iter().flat_map(f64::to_le_bytes).collect();
    let mut sums = vec![0_f64; columns];
    for squares in group.exchange(label, bytes)? {
        for (sum, bytes) in sums.iter_mut().zip(squares.chunks_exact(8)) {
            *sum += f64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
    }
    let norms = sums.into_iter().map(|sum| sum.sqrt() as f32);
    Ok(TensorData::new(norms.collect::<Vec<_>>(), [columns]))
}
