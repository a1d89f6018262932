//! Moving bytes from the ranks' sources into one rank's buffers.
//!
//! Lengths are not checked again here: each call checks its lengths when it starts, and the ranks then compare their
//! claims.

use std::ops::Range;

use super::round::Sources;
use burn_fsdp_rendezvous::{Checksums, ElementType, Extent, Reading, Reduction, Route};
use burn_fsdp_transport::{Buffer, copy, copy_and_read, reduce, reduce_and_read};

/// The checksums of a reduction.
pub(super) struct Combined {
    /// Checksum of each addend, in rank order.
    pub(super) addends: Vec<u64>,
    /// Checksum of the combined result.
    pub(super) result: u64,
}

/// Copies bytes, and returns their checksum.
fn copied(from: &[u8], to: &mut [u8]) -> u64 {
    let mut read = Reading::default();
    copy_and_read(from, to, |bytes| read.update(bytes));
    read.finalize()
}

/// Copies the bytes that one rank sends to another, part by part. Returns the first part that does not match the
/// announced checksum, if there is one.
pub(super) fn copy_all(
    sources: &Sources,
    routes: &[Route],
    told: Option<&[u64]>,
    into: &mut [Buffer],
) -> Option<usize> {
    let mut altered = None;
    for (part, ((source, route), buffer)) in sources.iter().zip(routes).zip(into).enumerate() {
        let Route { given, placed } = route.clone();
        let (from, to) = (&source.as_bytes()[given], &mut buffer.as_mut()[placed]);
        let Some(told) = told else {
            copy(from, to);
            continue;
        };
        if copied(from, to) != told[part] {
            altered = altered.or(Some(part));
        }
    }
    altered
}

/// Fills each buffer with the result of a reduction in which every rank has combined a slice.
///
/// Begins with the slice of rank `first`. If every rank begins with its own slice, the ranks read from different places
/// at any moment. Returns the checksums of each buffer if `reads` is true.
pub(super) fn join(
    reduction: &Reduction,
    extents: &[Extent],
    slices: &[Sources],
    (first, reads): (usize, bool),
    into: &mut [Buffer],
) -> Vec<Checksums> {
    let mut checksums = Vec::new();
    for (part, (buffer, extent)) in into.iter_mut().zip(extents).enumerate() {
        let full = buffer.as_mut();
        let mut pieces = vec![(0, 0); slices.len()];
        for rank in (first..slices.len()).chain(0..first) {
            let range = byte_range(extent, rank, reduction.output_of(extent.element));
            let (from, to) = (slices[rank][part].as_bytes(), &mut full[range]);
            if reads {
                pieces[rank] = (from.len(), copied(from, to))
            } else {
                copy(from, to)
            }
        }
        if reads {
            checksums.push(Checksums::of_pieces(pieces));
        }
    }
    checksums
}

/// Combines the ranks' full tensors, and fills each buffer with shard `shard` of the result. Returns the checksums of
/// each buffer's addends and result if `reads` is true.
pub(super) fn combine(
    reduction: &Reduction,
    extents: &[Extent],
    tensors: &[Sources],
    (shard, reads): (usize, bool),
    into: &mut [Buffer],
) -> Vec<Combined> {
    let mut combined = Vec::new();
    for (part, (buffer, extent)) in into.iter_mut().zip(extents).enumerate() {
        let range = byte_range(extent, shard, extent.element);
        let addends = tensors
            .iter()
            .map(|tensors| &tensors[part].as_bytes()[range.clone()]);
        let (addends, out) = (addends.collect::<Vec<_>>(), buffer.as_mut());
        if reads {
            let mut read: Vec<Reading> = (0..=addends.len()).map(|_| Reading::default()).collect();
            reduce_and_read(reduction, extent.element, &addends, out, |which, bytes| {
                read[which].update(bytes);
            });
            let mut sums: Vec<u64> = read.into_iter().map(Reading::finalize).collect();
            let result = sums.pop().unwrap_or_default();
            combined.push(Combined {
                addends: sums,
                result,
            });
        } else {
            reduce(reduction, extent.element, &addends, out)
        }
    }
    combined
}

/// Returns the range of a shard in its full tensor, in bytes.
fn byte_range(extent: &Extent, shard: usize, element: ElementType) -> Range<usize> {
    let Range { start, end } = extent.partition.range(shard);
    start * element.size()..end * element.size()
}
