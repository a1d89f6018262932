//! The elements that move from shard to shard when a tensor is resharded.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Partition};

/// A contiguous range of elements that moves from one shard of the old partition to one shard of the new partition.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Transfer {
    /// The shard of the old partition that holds the elements.
    pub from_shard: usize,
    /// The shard of the new partition that receives the elements.
    pub to_shard: usize,
    /// The elements, as indices into the whole tensor. Never empty.
    pub range: Range<usize>,
}

/// Returns the pieces that move to turn shards of `from` into shards of `to`, in the order of the tensor.
///
/// Together they cover every element once, and no two neighbours could be merged. There are fewer than
/// `from.num_shards() + to.num_shards()` of them.
///
/// # Errors
///
/// [`Error::DifferentTensors`] if the partitions differ in their number of elements.
pub fn transfers(from: &Partition, to: &Partition) -> Result<Vec<Transfer>, Error> {
    let num_elements = from.num_elements();
    if num_elements != to.num_elements() {
        return Err(Error::DifferentTensors {
            from: num_elements,
            to: to.num_elements(),
        });
    }
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < num_elements {
        let (from_shard, to_shard) = (from.owner(start), to.owner(start));
        let end = from.range(from_shard).end.min(to.range(to_shard).end);
        pieces.push(Transfer {
            from_shard,
            to_shard,
            range: start..end,
        });
        start = end;
    }
    Ok(pieces)
}
