//! Moving bytes out of the ranks' sources into one rank's buffers.
//!
//! Lengths are not checked again here: a call's own are checked when it starts, and that the ranks
//! agree on them when they meet.

use std::ops::Range;

use super::round::Sources;
use crate::arithmetic::{copy, reduce};
use crate::contract::Route;
use crate::operation::Extent;
use crate::{Buffer, ElementType, Reduction};

/// Copies what one rank gives another, part by part.
pub(super) fn copy_all(sources: &Sources, routes: &[Route], into: &mut [Buffer]) {
    for ((source, route), buffer) in sources.iter().zip(routes).zip(into) {
        let Route { given, placed } = route.clone();
        copy(&source.as_bytes()[given], &mut buffer.as_mut()[placed]);
    }
}

/// Fills each buffer with the result of a reduction of which every rank has combined a slice.
///
/// Begins with the slice of rank `first`: when every rank begins with its own, they read from
/// different places at any time.
pub(super) fn join(
    reduction: &Reduction,
    extents: &[Extent],
    slices: &[Sources],
    first: usize,
    into: &mut [Buffer],
) {
    for (part, (buffer, extent)) in into.iter_mut().zip(extents).enumerate() {
        let full = buffer.as_mut();
        for rank in (first..slices.len()).chain(0..first) {
            let range = byte_range(extent, rank, reduction.output_of(extent.element));
            copy(slices[rank][part].as_bytes(), &mut full[range]);
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

/// Returns the range of a shard in its full tensor, in bytes.
fn byte_range(extent: &Extent, shard: usize, element: ElementType) -> Range<usize> {
    let Range { start, end } = extent.partition.range(shard);
    start * element.size()..end * element.size()
}
