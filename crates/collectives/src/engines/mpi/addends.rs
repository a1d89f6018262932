//! Receives and combines the addends of the other ranks in a reduction.

use super::landing::Landing;
use burn_fsdp_rendezvous::{Reduction, Signature};
use burn_fsdp_transport::{Buffer, BufferPool, Source, reduce};

/// Returns buffers for the addends that rank `from` sends to rank `to`.
pub(super) fn scratch(signature: &Signature, from: usize, to: usize, pool: &BufferPool) -> Landing {
    let routes = signature.routes(from, to);
    Landing::new(
        routes
            .iter()
            .map(|route| pool.take(route.given.len()))
            .collect(),
    )
}

/// Combines this rank's own addends, which are in `sources`, with the other ranks' addends, in rank order. `addends`
/// has one buffer per part for each other rank, and `None` for this one.
pub(super) fn combine(
    signature: &Signature,
    reduction: &Reduction,
    rank: usize,
    sources: &[Source],
    addends: &[Option<Vec<Buffer>>],
    into: &mut [Buffer],
) {
    let own = signature.routes(rank, rank);
    for (part, (buffer, extent)) in into.iter_mut().zip(&signature.extents).enumerate() {
        // In rank order with this rank's share in its place, so the bits equal the `local` engine's.
        let bytes: Vec<&[u8]> = addends
            .iter()
            .map(|addend| match addend {
                Some(buffers) => buffers[part].as_ref(),
                None => &sources[part].as_bytes()[own[part].given.clone()],
            })
            .collect();
        reduce(reduction, extent.element, &bytes, buffer.as_mut());
    }
}
