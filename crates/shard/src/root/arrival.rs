//! The inputs and results of a reduction of gradients.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{
    At, Buffer, Label, Received, Reduction as Averaging, RestKind, Seal, Source,
};
use burn_fsdp_tensors::{self as tensors, Medium, is_host};

use super::accumulate::Gradient;
use super::audited::{Audited, GivenGradient, Station};
use crate::audit::{is_flagged, scale_of, tag_of_sum};
use crate::convert::cast;
use crate::copies::Generation;
use crate::divide_factors::DivideFactors;
use crate::error::Error;
use crate::hooks::ReductionHook;
use crate::seal;
use crate::slot::{Element, Slot};
use crate::unit::Unit;

/// The description of a reduced gradient in messages.
pub(super) const SUM: &str = "the reduced gradient";

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
        unit: &Unit,
        slot: &Slot,
        seal: Option<Seal>,
        gradient: &Tensor<1>,
    ) -> Option<Seal> {
        if self.element(slot).dtype == slot.elements.stored.dtype {
            seal.filter(|_| is_host(&gradient.device()))
        } else {
            seal::seal(&unit.groups.shard, gradient)
        }
    }

    /// Returns the data in `buffer` as a tensor of the parameter's held type, in its own memory: an optimizer may
    /// overwrite a gradient, and the gradient outlives the step.
    fn tensor(self, unit: &Unit, slot: &Slot, buffer: Buffer, device: &Device) -> Tensor<1> {
        let dtype = self.element(slot).dtype;
        let mut arrived = match tensors::arrived(buffer, dtype) {
            Ok(arrived) if arrived.device() == *device => arrived,
            // An offloaded shard's gradient.
            Ok(arrived) => unit.staging.moved(arrived, device),
            Err(buffer) => unit.staging.owned(buffer.as_ref().to_vec(), dtype, device),
        };
        seal::flip_if_told(&unit.groups.shard, At::Gradient, &mut arrived);
        cast(arrived, slot.elements.stored.dtype)
    }
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

    /// Returns the gradient's part in the note of its reduction.
    pub(super) fn given(&self) -> GivenGradient<'_> {
        let from = Station::Ended(self.generation.seals.number());
        GivenGradient::of((&self.generation.unit, self.slot), from, self.own.as_ref())
    }
}

/// The results of a reduction, as they arrived, to be taken one by one in the order of its gradients.
pub(super) struct Arrived {
    notes: Vec<Vec<u8>>,
    reduction: Averaging,
    ranks: usize,
    results: Results,
    number: usize,
    next: usize,
}

enum Results {
    /// Of the engine's reduction: a buffer for each gradient.
    Buffers(std::vec::IntoIter<(Buffer, Option<Seal>)>, Arrival),
    /// Of a hook: a tensor for each gradient that any rank has.
    Tensors(std::vec::IntoIter<Tensor<1>>),
}

impl Arrived {
    /// Returns the results of the engine's reduction over `ranks` ranks.
    pub(super) fn of(
        received: Received,
        (reduction, ranks): (&Averaging, usize),
        arrival: Arrival,
    ) -> Self {
        let number = received.buffers.len();
        let seals = received.seals.into_iter().map(Some);
        let seals = seals.chain(std::iter::repeat(None));
        let buffers: Vec<_> = received.buffers.into_iter().zip(seals).collect();
        Self {
            notes: received.notes,
            reduction: *reduction,
            ranks,
            results: Results::Buffers(buffers.into_iter(), arrival),
            number,
            next: 0,
        }
    }

    /// Returns the results of a hook that has reduced `number` gradients, for the flagged ones.
    pub(super) fn by_hook(
        notes: Vec<Vec<u8>>,
        (reduction, ranks): (Averaging, usize),
        number: usize,
        tensors: Vec<Tensor<1>>,
    ) -> Self {
        Self {
            notes,
            reduction,
            ranks,
            results: Results::Tensors(tensors.into_iter()),
            number,
            next: 0,
        }
    }

    /// Returns the next reduced gradient, which belongs to a slot, in the type of the shard; `None` if no rank has it.
    pub(super) fn next(
        &mut self,
        audited: &mut Audited,
        generation: &Generation,
        index: usize,
    ) -> Option<Tensor<1>> {
        let place = self.next;
        self.next += 1;
        let is_used = is_flagged(&self.notes, place);
        let (unit, device) = (&generation.unit, generation.home(index));
        let slot = &unit.slots[index];
        let (tensor, seal) = match &mut self.results {
            Results::Buffers(buffers, arrival) => {
                let (buffer, seal) = buffers.next().filter(|_| is_used)?;
                let tensor = arrival.tensor(unit, slot, buffer, &device);
                let seal = arrival.seal_of(unit, slot, seal, &tensor);
                (tensor, seal)
            }
            Results::Tensors(tensors) => {
                let part = is_used.then(|| tensors.next())??;
                let tensor = as_held(generation, index, part);
                let seal = seal::seal(&unit.groups.shard, &tensor);
                (tensor, seal)
            }
        };
        let what = || Label::from(generation.named_as(SUM, index));
        let at = seal::place(index, RestKind::Arrived);
        unit.seals.keep(at, seal, what);
        audited.arrived(unit, index, || {
            let scale = scale_of(&self.reduction, self.ranks);
            tag_of_sum(&self.notes, place, self.number).times(scale)
        });
        Some(tensor)
    }
}

/// Returns a result of a hook in the type and on the device of the shard.
fn as_held(generation: &Generation, index: usize, part: Tensor<1>) -> Tensor<1> {
    let unit = &generation.unit;
    let part = cast(part, unit.slots[index].elements.stored.dtype);
    let home = generation.home(index);
    if part.device() == home {
        return part;
    }
    unit.staging.moved(part, &home)
}

/// Returns a gradient of the reduction type as input to a reduction; zeros if this rank has none.
pub(super) fn source(
    gradient: Option<Gradient>,
    (unit, slot): (&Unit, &Slot),
    medium: &Medium,
) -> Source {
    let Some(gradient) = gradient else {
        return medium.zeros(slot.partition.num_elements(), slot.elements.reduce.dtype);
    };
    medium.source(&unit.staging, gradient.tensor, Some(gradient.account))
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
