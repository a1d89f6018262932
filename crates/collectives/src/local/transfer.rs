//! Moving bytes out of the ranks' sources into one rank's buffers.
//!
//! Lengths are not checked again here: a call's own are checked when it starts, and that the ranks
//! agree on them when they meet.

use std::ops::Range;

use super::round::Sources;
use crate::arithmetic::{copy, reduce};
use crate::operation::Extent;
use crate::{Buffer, ElementType, Reduction};

/// Fills each buffer with a full tensor of which every rank holds a shard. `element` maps the
/// element type of a part to that of the shards.
///
/// Begins with the shard of rank `first`: when every rank begins with its own, they read from
/// different places at any time.
pub(super) fn gather(
    extents: &[Extent],
    element: impl Fn(ElementType) -> ElementType,
    shards: &[Sources],
    first: usize,
    into: &mut [Buffer],
) {
    for (part, (buffer, extent)) in into.iter_mut().zip(extents).enumerate() {
        let full = buffer.as_mut();
        for rank in (first..shards.len()).chain(0..first) {
            let range = byte_range(extent, rank, element(extent.element));
            copy(shards[rank][part].as_bytes(), &mut full[range]);
        }
    }
}

/// Fills each buffer with the shard of rank `shard` of the combination of the ranks' full tensors.
pub(super) fn combine(
    reduction: &Reduction,
    extents: &[Extent],
    tensors: &[Sources],
    shard: usize,
    into: &mut [Buffer],
) {
    for (part, (buffer, extent)) in into.iter_mut().zip(extents).enumerate() {
        let range = byte_range(extent, shard, extent.element);
        let addends = tensors
            .iter()
            .map(|tensors| &tensors[part].as_bytes()[range.clone()]);
        reduce(
            reduction,
            extent.element,
            &addends.collect::<Vec<_>>(),
            buffer.as_mut(),
        );
    }
}

/// Fills each buffer with a full tensor.
pub(super) fn read(tensors: &Sources, into: &mut [Buffer]) {
    for (buffer, tensor) in into.iter_mut().zip(tensors.iter()) {
        copy(tensor.as_bytes(), buffer.as_mut());
    }
}

/// Fills each buffer with the shard of rank `shard` of a full tensor.
pub(super) fn read_shard(extents: &[Extent], tensors: &Sources, shard: usize, into: &mut [Buffer]) {
    for ((buffer, extent), tensor) in into.iter_mut().zip(extents).zip(tensors.iter()) {
        let range = byte_range(extent, shard, extent.element);
        copy(&tensor.as_bytes()[range], buffer.as_mut());
    }
}

/// Where a shard lies in its full tensor, in bytes.
fn byte_range(extent: &Extent, shard: usize, element: ElementType) -> Range<usize> {
    let Range { start, end } = extent.partition.range(shard);
    start * element.size()..end * element.size()
}
