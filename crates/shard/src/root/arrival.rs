//! Gradients as a reduction takes them in, and as they arrive from it.

use std::sync::Arc;

use burn::tensor::{Device, Shape, Tensor};
use burn_fsdp_collectives::{
    At, Buffer, Label, ProcessGroup, Received, Reduction as Averaging, Seal, Source,
};

use super::accumulate::Gradient;
use crate::copies::Generation;
use crate::device::is_host;
use crate::error::Error;
use crate::op::Reduced;
use crate::seal;
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

    /// Returns the seal of a gradient that has arrived: that of its buffer, unless it was changed to another type.
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
        match self.element(slot).dtype == slot.elements.stored.dtype {
            true => Some(seal),
            false => seal::seal(group, gradient),
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
        let mut arrived = unit.staging.owned(buffer.as_ref().to_vec(), dtype, device);
        seal::flip_if_told(&unit.groups.shard, At::Gradient, &mut arrived);
        cast(arrived, slot.elements.stored.dtype)
    }
}

/// Returns the reduced gradients of `leaves` that any rank used, but for what another rank owns. `notes` say who used
/// what.
pub(super) fn gradients_of<'a>(
    leaves: impl Iterator<Item = (&'a Arc<Generation>, usize)>,
    received: Received,
    notes: &[Vec<u8>],
    arrival: Arrival,
) -> Vec<Reduced> {
    let mut seals = received.seals.into_iter();
    leaves
        .zip(received.buffers)
        .map(|arrived| (arrived, seals.next()))
        .enumerate()
        .filter(|(index, _)| is_used(notes, *index))
        .filter_map(|(_, (((generation, index), buffer), seal))| {
            let slot = &generation.unit.slots[index];
            let rank = generation.unit.groups.shard.rank();
            if slot.is_elsewhere(rank) {
                return None;
            }
            let device = generation.home(index);
            let gradient = arrival.tensor(&generation.unit, slot, buffer, &device);
            let seal = arrival.seal_of(slot, &generation.unit.groups.shard, seal, &gradient);
            Some(Reduced {
                node: generation.node(index)?,
                shape: Shape::from(slot.shown_shape(rank)),
                seal: seal.map(|seal| {
                    let what = generation.named_as("the reduced gradient", index);
                    (seal, Label::from(what))
                }),
                gradient,
            })
        })
        .collect()
}

/// Returns true if any rank flagged place `index`.
pub(super) fn is_used(notes: &[Vec<u8>], index: usize) -> bool {
    notes.iter().any(|note| note.get(index) == Some(&1))
}

/// Returns reduced gradients as tensors, in the type of the shards, with their seals where ranks compare bytes.
pub(super) fn tensors(
    generation: &Generation,
    slots: &[usize],
    received: Received,
    arrival: Arrival,
) -> Vec<(Tensor<1>, Option<Seal>)> {
    let mut seals = received.seals.into_iter();
    let tensor = |(&index, buffer): (&usize, Buffer)| {
        let device = generation.home(index);
        let unit = &generation.unit;
        let slot = &unit.slots[index];
        let gradient = arrival.tensor(unit, slot, buffer, &device);
        let seal = arrival.seal_of(slot, &unit.groups.shard, seals.next(), &gradient);
        (gradient, seal)
    };
    slots.iter().zip(received.buffers).map(tensor).collect()
}

/// Returns a gradient as a source, as the policy's hook wants it; zeros if this rank has none.
pub(super) fn source_of(
    gradient: Option<Gradient>,
    slot: &Slot,
    unit: &Unit,
) -> Result<Source, Error> {
    let elements = slot.partition.num_elements();
    let Some(Gradient {
        tensor, account, ..
    }) = gradient
    else {
        return Ok(Source::new(vec![0; elements * slot.elements.reduce.size()]));
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
    Ok(unit
        .staging
        .source(cast(tensor, slot.elements.reduce.dtype), Some(account)))
}
