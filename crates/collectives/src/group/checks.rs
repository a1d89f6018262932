//! The checksums of the bytes that a rank sends and receives.

use std::ops::Range;

use burn_fsdp_rendezvous::{Checks, Sealed, Signature, checksum};
use burn_fsdp_transport::{AlteredPart, Buffer, Source};

/// Returns the checksums of the bytes that a rank sends to each rank of a group. If `trusts_seals` is true, the
/// checksum of a source that is sent whole comes from its seal. Otherwise all bytes are read.
pub(super) fn of_given(
    signature: &Signature,
    (rank, size): (usize, usize),
    sources: &[Source],
    trusts_seals: bool,
) -> Vec<u64> {
    // Most operations send all ranks the same bytes, which are read once.
    let mut last: Vec<Option<(Range<usize>, u64)>> = vec![None; sources.len()];
    let mut given = Vec::with_capacity(size * sources.len());
    for to in 0..size {
        let routes = signature.routes(rank, to);
        for (part, source) in sources.iter().enumerate() {
            let range = routes.get(part).map_or(0..0, |route| route.given.clone());
            let known = last[part].take().filter(|(known, _)| *known == range);
            let (range, checksum) = known.unwrap_or_else(|| {
                let is_whole = range == (0..source.len());
                let sealed = source.note::<Sealed>();
                let sealed = sealed.filter(|_| trusts_seals && is_whole);
                let told = sealed.and_then(|sealed| sealed.seal.checksums().whole());
                let read = || checksum(&source.as_bytes()[range.clone()]);
                let told = told.unwrap_or_else(read);
                (range, told)
            });
            given.push(checksum);
            last[part] = Some((range, checksum));
        }
    }
    given
}

/// Compares the contents of the buffers of rank `to` with the checksums that rank `from` has announced. Returns the
/// first part that differs.
pub(super) fn first_misplaced(
    checks: &Checks,
    signature: &Signature,
    (from, to): (usize, usize),
    buffers: &[Buffer],
) -> Option<AlteredPart> {
    let routes = signature.routes(from, to);
    if buffers.is_empty() || routes.is_empty() {
        return None;
    }
    let placed = buffers.iter().zip(routes);
    let placed = placed.map(|(buffer, route)| &buffer.as_ref()[route.placed]);
    let part = checks.first_altered(to, placed)?;
    Some(AlteredPart::on_its_way(from, part))
}
