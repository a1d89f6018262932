//! Results in the memory of a device: the rank's buffers make them from the sources of all ranks.

use std::sync::Arc;

use super::round::Sources;
use burn_fsdp_rendezvous::{Extent, Reduction, Route};
use burn_fsdp_transport::{Buffer, DeviceMemory, Payload, Source, Stopped, Stretch};

/// Returns true if the results are made on a device. All buffers that are not empty are in the same memory.
pub(super) fn are_on_device(into: &[Buffer]) -> bool {
    into.iter().any(|buffer| buffer.memory().is_some())
}

/// Returns the sources in host memory, copied there if they are on a device.
pub(super) fn on_host(sources: Sources) -> Result<Sources, Stopped> {
    if sources.iter().all(|source| source.host().is_some()) {
        return Ok(sources);
    }
    let read = |source: &Source| match source.host() {
        Some(_) => Ok(source.clone()),
        None => Ok(Source::new(source.read()?.into_owned())),
    };
    let read: Result<_, String> = sources.iter().map(read).collect();
    read.map_err(Stopped::Failed)
}

/// Makes the results of an operation that only moves bytes. `given` has the sources and the routes of each rank that
/// sends to this one.
pub(super) fn place(
    extents: &[Extent],
    given: &[(Sources, Vec<Route>)],
    into: &mut [Buffer],
) -> Result<(), Stopped> {
    replace(into, |part, memory, len| {
        let stretches = given.iter().map(|(sources, routes)| Stretch {
            source: &sources[part],
            given: routes[part].given.clone(),
            at: routes[part].placed.start,
        });
        let stretches: Vec<_> = stretches.collect();
        memory.join(extents[part].element, len, &stretches)
    })
}

/// Makes shard `shard` of a reduction.
pub(super) fn combine(
    reduction: &Reduction,
    extents: &[Extent],
    tensors: &[Sources],
    shard: usize,
    into: &mut [Buffer],
) -> Result<(), Stopped> {
    replace(into, |part, memory, _| {
        combined(reduction, &extents[part], tensors, (part, shard), memory)
    })
}

/// Returns slice `slice` of an all-reduce, one source per part, in the memory of `into`.
pub(super) fn slice(
    reduction: &Reduction,
    extents: &[Extent],
    tensors: &[Sources],
    slice: usize,
    into: &[Buffer],
) -> Result<Vec<Source>, Stopped> {
    let parts = extents.iter().zip(into).enumerate();
    let parts = parts.map(|(part, (extent, buffer))| {
        match (buffer.memory(), extent.partition.len(slice)) {
            (Some(memory), 1..) => {
                let made = combined(reduction, extent, tensors, (part, slice), memory)?;
                Ok(Source::of(Arc::from(made)))
            }
            _ => Ok(Source::empty()),
        }
    });
    let parts: Result<_, String> = parts.collect();
    parts.map_err(Stopped::Failed)
}

/// Makes the results of an all-reduce from its slices, one list per rank.
pub(super) fn join(
    reduction: &Reduction,
    extents: &[Extent],
    slices: &[Sources],
    into: &mut [Buffer],
) -> Result<(), Stopped> {
    replace(into, |part, memory, len| {
        let extent = &extents[part];
        let output = reduction.output_of(extent.element);
        let stretches = slices.iter().enumerate().map(|(rank, sources)| Stretch {
            source: &sources[part],
            given: 0..sources[part].len(),
            at: extent.partition.range(rank).start * output.size(),
        });
        let stretches: Vec<_> = stretches.collect();
        memory.join(output, len, &stretches)
    })
}

fn combined(
    reduction: &Reduction,
    extent: &Extent,
    tensors: &[Sources],
    (part, shard): (usize, usize),
    memory: &Arc<dyn DeviceMemory>,
) -> Result<Box<dyn Payload>, String> {
    let size = extent.element.size();
    let range = extent.partition.range(shard);
    let addends = tensors.iter().map(|tensors| Stretch {
        source: &tensors[part],
        given: range.start * size..range.end * size,
        at: 0,
    });
    let addends: Vec<_> = addends.collect();
    memory.combine(reduction, extent.element, &addends)
}

/// Replaces each buffer, except empty ones, by the payload that `make` returns for its index, memory and length.
fn replace(
    into: &mut [Buffer],
    make: impl Fn(usize, &Arc<dyn DeviceMemory>, usize) -> Result<Box<dyn Payload>, String>,
) -> Result<(), Stopped> {
    for (part, buffer) in into.iter_mut().enumerate() {
        let Some(memory) = buffer.memory().filter(|_| !buffer.is_empty()) else {
            continue;
        };
        let made = make(part, memory, buffer.len()).map_err(Stopped::Failed)?;
        *buffer = Buffer::arrived(made);
    }
    Ok(())
}
