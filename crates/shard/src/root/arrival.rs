//! The inputs and results of a reduction of gradients.

use std::sync::Arc;

use burn::tensor::{Device, Shape, Tensor};
use burn_fsdp_collectives::{
    At, Buffer, Label, ProcessGroup, Received, Reduction as Averaging, Seal, Source,
};
use burn_fsdp_tensors::is_host;

use super::accumulate::{Gradient, Sum};
use crate::audit::{Tag, is_flagged, scale_of, tag_of_sum};
use crate::convert::cast;
use crate::copies::Generation;
use crate::divide_factors::DivideFactors;
use crate::error::Error;
use crate::files;
use crate::hooks::ReductionHook;
use crate::op::Reduced;
use crate::seal;
use crate::slot::{Element, Slot};
use crate::unit::Unit;

/// The element type in which the results of a reduction arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The type in which the parameters are held.
    AsHeld,
    /// The type in which each gradient is sent. Used if the parameters have several types, because all results of one
    /// reduction have the same type.
    AsReduced,
}

impl Arrival {
    /// Returns `reduction` with the element type of its results for the gradients of `slots`, and the matching
    /// [`Arrival`].
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
        if elements.all(|element| element == widened.elements.stored) {
            (reduction.output(widened.elements.stored.wire), Self::AsHeld)
        } else {
            (reduction, Self::AsReduced)
        }
    }

    pub(super) fn element(self, slot: &Slot) -> Element {
        match self {
            Self::AsHeld => slot.elements.stored,
            Self::AsReduced => slot.elements.reduce,
        }
    }

    /// Returns the seal of a gradient on arrival: its buffer's seal, unless it was cast to another type.
    fn seal_of(
        self,
        slot: &Slot,
        group: &ProcessGroup,
        seal: Option<Seal>,
        gradient: &Tensor<1>,
    ) -> Option<Seal> {
        let seal = seal?;
        if !is_host(&gradient.device()) {
            return None;
        }
        if self.element(slot).dtype == slot.elements.stored.dtype {
            Some(seal)
        } else {
            seal::seal(group, gradient)
        }
    }

    /// Returns the data in `buffer` as a tensor of the parameter's held type, in its own memory: an optimizer may
    /// overwrite a gradient, and the gradient outlives the step.
    fn tensor(
        self,
        unit: &Unit,
        slot: &Slot,
        buffer: impl AsRef<[u8]>,
        device: &Device,
    ) -> Tensor<1> {
        let dtype = self.element(slot).dtype;
        let mut arrived = unit.staging.owned(buffer.as_ref().to_vec(), dtype, device);
        seal::flip_if_told(&unit.groups.shard, At::Gradient, &mut arrived);
        cast(arrived, slot.elements.stored.dtype)
    }
}

/// A gradient, as input to a reduction.
pub(super) struct Given {
    pub(super) source: Source,
    /// The gradient's tag; `None` if this rank has no gradient.
    pub(super) tag: Option<Tag>,
}

/// A gradient of a parameter that every rank holds whole.
pub(super) struct Whole {
    pub(super) generation: Arc<Generation>,
    pub(super) slot: usize,
    /// This rank's gradient, after the policy's hook, in the reduction type.
    pub(super) own: Option<Gradient>,
}

impl Whole {
    pub(super) fn factors(&self) -> Option<DivideFactors> {
        self.generation.unit.factors()
    }

    pub(super) fn hook(&self) -> Option<&ReductionHook> {
        self.generation.unit.hooks.all_reduce.as_ref()
    }

    pub(super) fn tag(&self) -> Option<Tag> {
        self.own.as_ref().map(|own| own.tag)
    }
}

/// A reduced gradient, as a reduction returned it.
pub(super) struct Arrived {
    pub(super) buffer: Buffer,
    /// True if any rank has the gradient.
    pub(super) is_used: bool,
    pub(super) tag: Tag,
    /// The gradient's checksum, if ranks compare bytes.
    pub(super) seal: Option<Seal>,
}

/// Returns the results of a reduction over `ranks` ranks, from the buffers and notes in `received`.
pub(super) fn arrived(received: Received, reduction: &Averaging, ranks: usize) -> Vec<Arrived> {
    let (number, notes) = (received.buffers.len(), received.notes);
    let scale = scale_of(reduction, ranks);
    let mut seals = received.seals.into_iter();
    let arrived = |(index, buffer)| Arrived {
        buffer,
        is_used: is_flagged(&notes, index),
        tag: tag_of_sum(&notes, index, number).times(scale),
        seal: seals.next(),
    };
    received
        .buffers
        .into_iter()
        .enumerate()
        .map(arrived)
        .collect()
}

/// Returns the reduced gradients of `leaves`, except those that no rank has, and those of parameters that another rank
/// owns.
pub(super) fn gradients_of<'a>(
    leaves: impl Iterator<Item = (&'a Arc<Generation>, usize)>,
    arrived: Vec<Arrived>,
    arrival: Arrival,
) -> Result<Vec<Reduced>, Error> {
    leaves
        .zip(arrived)
        .filter_map(|((generation, index), arrived)| {
            reduced(generation, index, sum(generation, index, arrived, arrival)?)
        })
        .collect()
}

/// Returns the reduced gradients of slots as tensors in the shards' type; `None` for gradients that no rank has.
pub(super) fn sums(
    generation: &Generation,
    slots: &[usize],
    arrived: Vec<Arrived>,
    arrival: Arrival,
) -> Vec<Option<Sum>> {
    let sum = |(&index, arrived): (&usize, Arrived)| sum(generation, index, arrived, arrival);
    slots.iter().zip(arrived).map(sum).collect()
}

/// Returns the reduced gradient of one slot, like [`sums`].
pub(super) fn sum(
    generation: &Generation,
    index: usize,
    arrived: Arrived,
    arrival: Arrival,
) -> Option<Sum> {
    if !arrived.is_used {
        return None;
    }
    let (unit, device) = (&generation.unit, generation.home(index));
    let slot = &unit.slots[index];
    let tensor = arrival.tensor(unit, slot, arrived.buffer, &device);
    let seal = arrival.seal_of(slot, &unit.groups.shard, arrived.seal, &tensor);
    Some(Sum {
        tensor,
        tag: arrived.tag,
        seal,
    })
}

/// Returns a reduced gradient as a gradient of its parameter's leaf; `None` if the parameter is frozen, or another rank
/// owns it. The gradient of a shard in a file is written to one.
pub(super) fn reduced(
    generation: &Generation,
    index: usize,
    sum: Sum,
) -> Option<Result<Reduced, Error>> {
    let unit = &generation.unit;
    let slot = &unit.slots[index];
    let rank = unit.groups.shard.rank();
    if slot.is_elsewhere(rank) {
        return None;
    }
    let node = generation.node(index)?;
    let gradient = unit.in_file(index, files::GRADIENT, sum.tensor);
    let reduced = gradient.map(|gradient| Reduced {
        node,
        shape: Shape::from(slot.shown_shape(rank)),
        seal: sum.seal.map(|seal| {
            let what = generation.named_as("the reduced gradient", index);
            (seal, Label::from(what))
        }),
        gradient,
        tag: sum.tag,
    });
    Some(reduced.map_err(Error::from))
}

/// Returns a gradient as input to a reduction, after the policy's hook; zeros if this rank has none.
pub(super) fn given(gradient: Option<Gradient>, slot: &Slot, unit: &Unit) -> Result<Given, Error> {
    let gradient = gradient.map(|gradient| hooked(gradient, slot, unit));
    Ok(sent(gradient.transpose()?, slot, unit))
}

/// Returns a gradient of the reduction type as input to a reduction; zeros if this rank has none.
pub(super) fn sent(gradient: Option<Gradient>, slot: &Slot, unit: &Unit) -> Given {
    let Some(gradient) = gradient else {
        let bytes = slot.partition.num_elements() * slot.elements.reduce.size();
        return Given {
            source: Source::new(vec![0; bytes]),
            tag: None,
        };
    };
    Given {
        source: unit.staging.source(gradient.tensor, Some(gradient.account)),
        tag: Some(gradient.tag),
    }
}

/// Applies the policy's hook to a gradient, and returns the result in the reduction type.
pub(super) fn hooked(gradient: Gradient, slot: &Slot, unit: &Unit) -> Result<Gradient, Error> {
    let elements = slot.partition.num_elements();
    let tensor = match &unit.hooks.gradient {
        Some(hook) => hook.call(&slot.path, gradient.tensor),
        None => gradient.tensor,
    };
    let [len] = tensor.dims();
    if len != elements || tensor.is_autodiff() {
        return Err(Error::Hook {
            of: format!("gradient of `{}`", slot.path),
            expected: format!("{elements} elements"),
            got: if tensor.is_autodiff() {
                format!("returned {len} elements with a graph")
            } else {
                format!("returned {len} elements")
            },
        });
    }
    Ok(Gradient {
        tensor: cast(tensor, slot.elements.reduce.dtype),
        ..gradient
    })
}
