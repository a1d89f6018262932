//! Gradients as a reduction takes them in, and as they arrive from it.

use std::sync::Arc;

use burn::tensor::{Device, Shape, Tensor};
use burn_fsdp_collectives::{Buffer, Reduction as Averaging, Source};

use super::accumulate::{Gradient, Tagged};
use crate::audit::{Tag, is_flagged, scale_of, tag_of_sum};
use crate::copies::Generation;
use crate::error::Error;
use crate::op::Reduced;
use crate::slot::{Element, Slot};
use crate::transport::cast;
use crate::unit::Unit;

/// The element type in which reduced gradients arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The type in which each parameter is held.
    AsHeld,
    /// The type in which each gradient travels: one reduction gives its results one type, and the
    /// parameters are held in several.
    AsReduced,
}

impl Arrival {
    /// Returns `reduction` with the element type of its results, for the gradients of `slots`, and
    /// their arrival.
    pub(super) fn of<'a>(
        reduction: Averaging,
        slots: impl Iterator<Item = &'a Slot> + Clone,
    ) -> (Averaging, Self) {
        let Some(widened) = slots
            .clone()
            .find(|slot| slot.elements.reduce != slot.elements.stored)
        else {
            return (reduction, Self::AsHeld);
        };
        let mut elements = slots.map(|slot| slot.elements.stored);
        match elements.all(|element| element == widened.elements.stored) {
            true => (reduction.output(widened.elements.stored.wire), Self::AsHeld),
            false => (reduction, Self::AsReduced),
        }
    }

    pub(super) fn element(self, slot: &Slot) -> Element {
        match self {
            Self::AsHeld => slot.elements.stored,
            Self::AsReduced => slot.elements.reduce,
        }
    }

    /// Returns what has arrived in `buffer`, as it is held, in memory of its own: an optimizer may
    /// write over a gradient, and what it makes of it outlives the step.
    fn tensor(
        self,
        unit: &Unit,
        slot: &Slot,
        buffer: impl AsRef<[u8]>,
        device: &Device,
    ) -> Tensor<1> {
        let dtype = self.element(slot).dtype;
        let arrived = unit.staging.owned(buffer.as_ref().to_vec(), dtype, device);
        cast(arrived, slot.elements.stored.dtype)
    }
}

/// A gradient as a reduction takes it in.
pub(super) struct Given {
    pub(super) source: Source,
    /// Its tag; `None` if this rank has no gradient.
    pub(super) tag: Option<Tag>,
}

/// A reduced gradient as it comes.
pub(super) struct Arrived {
    pub(super) buffer: Buffer,
    /// True if any rank has a gradient.
    pub(super) is_used: bool,
    pub(super) tag: Tag,
}

/// Returns what a reduction over `ranks` has brought, with these notes.
pub(super) fn arrived(
    buffers: Vec<Buffer>,
    notes: Vec<Vec<u8>>,
    reduction: &Averaging,
    ranks: usize,
) -> Vec<Arrived> {
    let number = buffers.len();
    let scale = scale_of(reduction, ranks);
    let arrived = |(index, buffer)| Arrived {
        buffer,
        is_used: is_flagged(&notes, index),
        tag: tag_of_sum(&notes, index, number).times(scale),
    };
    buffers.into_iter().enumerate().map(arrived).collect()
}

/// Returns the reduced gradients of `leaves` that any rank used, but for what another rank owns.
pub(super) fn gradients_of<'a>(
    leaves: impl Iterator<Item = (&'a Arc<Generation>, usize)>,
    arrived: Vec<Arrived>,
    arrival: Arrival,
) -> Vec<Reduced> {
    leaves
        .zip(arrived)
        .filter(|(_, arrived)| arrived.is_used)
        .filter_map(|((generation, index), Arrived { buffer, tag, .. })| {
            let slot = &generation.unit.slots[index];
            let rank = generation.unit.groups.shard.rank();
            if slot.is_elsewhere(rank) {
                return None;
            }
            let device = generation.home(index);
            Some(Reduced {
                node: generation.node(index)?,
                shape: Shape::from(slot.shown_shape(rank)),
                gradient: arrival.tensor(&generation.unit, slot, buffer, &device),
                tag,
            })
        })
        .collect()
}

/// Returns the reduced gradients of slots as tensors, in the type of the shards; `None` for what no rank has.
pub(super) fn sums(
    generation: &Generation,
    slots: &[usize],
    arrived: Vec<Arrived>,
    arrival: Arrival,
) -> Vec<Option<Tagged>> {
    let sum = |(&index, arrived): (&usize, Arrived)| {
        let device = generation.home(index);
        let unit = &generation.unit;
        arrived.is_used.then(|| Tagged {
            tensor: arrival.tensor(unit, &unit.slots[index], arrived.buffer, &device),
            tag: arrived.tag,
        })
    };
    slots.iter().zip(arrived).map(sum).collect()
}

/// Returns a gradient as a reduction takes it in, as the policy's hook wants it; zeros if this rank has none.
pub(super) fn given(gradient: Option<Gradient>, slot: &Slot, unit: &Unit) -> Result<Given, Error> {
    let elements = slot.partition.num_elements();
    let Some(Gradient {
        tensor,
        account,
        tag,
    }) = gradient
    else {
        return Ok(Given {
            source: Source::new(vec![0; elements * slot.elements.reduce.size()]),
            tag: None,
        });
    };
    let tensor = match &unit.gradients.hook {
        Some(hook) => hook.call(&slot.path, tensor),
        None => tensor,
    };
    let [len] = tensor.dims();
    if len != elements || tensor.is_autodiff() {
        return Err(Error::Hook {
            path: slot.path.clone(),
            expected: elements,
            got: match tensor.is_autodiff() {
                true => format!("{len} elements with a graph"),
                false => format!("{len} elements"),
            },
        });
    }
    let tensor = cast(tensor, slot.elements.reduce.dtype);
    Ok(Given {
        source: unit.staging.source(tensor, Some(account)),
        tag: Some(tag),
    })
}
