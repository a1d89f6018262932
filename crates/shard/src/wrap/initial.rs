//! Initial values: rank 0's, sharded on the way to the other ranks.

use burn::module::Param;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{BufferPool, FullPart, ProcessGroup, Received, Source};
use burn_fsdp_tensors as tensors;

use crate::error::Error;
use crate::slot::Slot;
use crate::unit::Unit;

/// Returns this rank's part of rank 0's value of `param`. No other rank initializes the parameter, and no rank holds
/// more than one whole parameter at a time.
///
/// With replicas, rank 0's replica receives the value first, and passes its shards on to the others.
pub(crate) fn value<const D: usize>(
    unit: &Unit,
    slot: &Slot,
    param: &Param<Tensor<D>>,
) -> Result<Tensor<1>, Error> {
    let device = unit.home(&param.lazy_device());
    let is_first = match &unit.groups.replicas {
        Some(replicas) => replicas.rank() == 0,
        None => true,
    };
    let held = if is_first {
        let source = match unit.groups.shard.rank() {
            0 => source_of(param, slot),
            _ => Source::empty(),
        };
        Some(from_first(unit, slot, source, &device)?)
    } else {
        None
    };
    match &unit.groups.replicas {
        Some(replicas) => {
            let elements = slot.held_elements(unit.groups.shard.rank());
            broadcast(replicas, slot, elements, held, &device)
        }
        None => Ok(held.expect("the only replica is the first")),
    }
}

/// Scatters a value from rank 0 of the shard group, or broadcasts it if every rank holds it whole. Returns this rank's
/// part.
fn from_first(
    unit: &Unit,
    slot: &Slot,
    source: Source,
    device: &Device,
) -> Result<Tensor<1>, Error> {
    let group = &unit.groups.shard;
    if !slot.is_gathered() {
        let whole = (group.rank() == 0).then(|| leaf(source.as_bytes(), slot, device));
        return broadcast(group, slot, slot.partition.num_elements(), whole, device);
    }
    let elements = slot.partition.len(group.rank());
    let into = vec![BufferPool::new().take(elements * slot.elements.stored.size())];
    let part = slot.part(source, slot.elements.stored);
    let received = group
        .start_scatter(label(slot), Vec::new(), 0, vec![part], into)?
        .wait_released()?;
    Ok(first_tensor(received, slot, device))
}

/// Broadcasts a tensor of `elements` elements from rank 0 of `group`, and returns it.
fn broadcast(
    group: &ProcessGroup,
    slot: &Slot,
    elements: usize,
    own: Option<Tensor<1>>,
    device: &Device,
) -> Result<Tensor<1>, Error> {
    let part = FullPart {
        source: match &own {
            Some(own) => tensors::source(own.clone().inner(), None),
            None => Source::empty(),
        },
        num_elements: elements,
        element: slot.elements.stored.wire,
    };
    // The source of a broadcast already has the data, so it receives nothing.
    let into = match own {
        Some(_) => Vec::new(),
        None => vec![BufferPool::new().take(elements * slot.elements.stored.size())],
    };
    let received = group
        .start_broadcast(label(slot), Vec::new(), 0, vec![part], into)?
        .wait_released()?;
    Ok(own.unwrap_or_else(|| first_tensor(received, slot, device)))
}

/// Returns the name of the operation. It includes an adapter's scale, and whether the parameter is frozen, so ranks that
/// differ in these fail at this operation.
fn label(slot: &Slot) -> String {
    let adapted = slot.adapter.as_ref().map(|adapter| {
        let (rank, scale) = (adapter.rank, adapter.scale);
        let method = adapter.magnitude.map_or("", |_| " by DoRA");
        format!(", adapted{method} at rank {rank} with a scale of {scale}")
    });
    let frozen = if slot.starts_trained { "" } else { ", frozen" };
    let adapted = adapted.unwrap_or_default();
    format!("{} initial value{adapted}{frozen}", slot.path)
}

fn first_tensor(received: Received, slot: &Slot, device: &Device) -> Tensor<1> {
    let buffer = received.buffers.into_iter().next();
    let buffer = buffer.expect("one part was asked for");
    tensors::tensor(buffer, slot.elements.stored.dtype, device)
}

fn source_of<const D: usize>(param: &Param<Tensor<D>>, slot: &Slot) -> Source {
    let value = param.val().inner();
    let flat: Tensor<1> = value.reshape([slot.partition.num_elements()]);
    let flat = if flat.dtype() == slot.elements.stored.dtype {
        flat
    } else {
        flat.cast(slot.elements.stored.dtype)
    };
    tensors::source(flat, None)
}

/// Returns a leaf with its own memory, because the tensor that rank 0 sends may be a view of a larger one.
fn leaf(bytes: &[u8], slot: &Slot, device: &Device) -> Tensor<1> {
    tensors::owned(bytes.to_vec(), slot.elements.stored.dtype, device)
}
