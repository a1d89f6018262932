//! Reductions that the policy's hook performs instead of the engine.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_collectives::Account;
use burn_fsdp_tensors::is_host;

use super::accumulate::{Gradient, Sum};
use super::arrival::hooked;
use super::state::{Progress, Root};
use crate::audit::{is_flagged, scale_of, tag_of_sum};
use crate::convert::cast;
use crate::copies::Generation;
use crate::error::Error;
use crate::reduction_hook::{FullGradient, ReductionHook, UnitReduction};
use crate::seal;
use crate::slot::Slots;

impl Progress {
    /// Calls the hook to reduce the gradients of a unit, and returns this rank's part of each; `None` for gradients
    /// that no rank has. The ranks first exchange which gradients they have, so all pass the same ones to the hook.
    pub(super) fn reduce_by(
        &mut self,
        root: &Root,
        hook: &ReductionHook,
        generation: &Arc<Generation>,
        slots: &[usize],
        gradients: &mut Slots<Gradient>,
    ) -> Result<Vec<Option<Sum>>, Error> {
        let unit = &generation.unit;
        let group = &unit.groups.reduce;
        let mean = unit.averaging();
        let mut own = Vec::with_capacity(slots.len());
        for &index in slots {
            let gradient = gradients[index].take();
            own.push(match gradient {
                Some(gradient) => Some(hooked(gradient, &unit.slots[index], unit)?),
                None => None,
            });
        }
        let tags = own.iter().map(|own| own.as_ref().map(|own| own.tag));
        let note = self.unit_note(unit, tags);
        let label = root.label(format_args!(
            "{} gradients of ranks, values {:08x},",
            unit.label(),
            generation.fingerprint()
        ));
        let pending = group.start_exchange(label, note)?;
        self.audited.carries(Some(unit), pending.operation());
        let notes = pending.wait()?;
        self.early.hear(unit, &notes);
        let used: Vec<_> = (0..slots.len())
            .map(|place| is_flagged(&notes, place))
            .collect();
        let mut accounts = Vec::with_capacity(slots.len());
        let all = slots.iter().zip(own).zip(&used);
        let gradients = all
            .filter(|(_, is_used)| **is_used)
            .map(|((&index, own), _)| full_gradient(generation, index, own, &mut accounts));
        let gradients = gradients.collect();
        let reduction = UnitReduction {
            unit: unit.label(),
            label: root.label(format_args!("{} reduction by the hook", unit.label())),
            group: group.clone(),
            pool: root.reduced.clone(),
            mean,
            divisor: 1.0 / (mean.pre_scale * mean.post_scale),
            gradients,
        };
        let mut parts = hook.call(&reduction)?.into_iter();
        drop(accounts);
        let scale = scale_of(&mean, group.size());
        let all = slots.iter().zip(used).enumerate();
        let sums = all.map(|(number, (&index, is_used))| {
            let part = is_used.then(|| parts.next()).flatten()?;
            let tensor = as_held(generation, index, part);
            Some(Sum {
                seal: if is_host(&tensor.device()) {
                    seal::seal(&unit.groups.shard, &tensor)
                } else {
                    None
                },
                tensor,
                tag: tag_of_sum(&notes, number, slots.len()).times(scale),
            })
        });
        Ok(sums.collect())
    }
}

/// Returns this rank's full gradient for the hook, or zeros if it has none. Moves the gradient's memory account to
/// `accounts`.
fn full_gradient(
    generation: &Generation,
    index: usize,
    own: Option<Gradient>,
    accounts: &mut Vec<Account>,
) -> FullGradient {
    let unit = &generation.unit;
    let slot = &unit.slots[index];
    let tensor = match own {
        Some(own) => {
            accounts.push(own.account);
            own.tensor
        }
        None => {
            let device = generation.device(index).without_autodiff();
            let elements = slot.partition.num_elements();
            Tensor::zeros([elements], (&device, slot.elements.reduce.dtype))
        }
    };
    FullGradient {
        path: slot.path.clone(),
        shape: slot.shape.clone(),
        tensor,
        partition: slot.is_gathered().then_some(slot.partition),
        held: slot.held_range(unit.groups.shard.rank()),
    }
}

/// Returns a result of the hook in the type and on the device of the shard.
fn as_held(generation: &Generation, index: usize, part: Tensor<1>) -> Tensor<1> {
    let unit = &generation.unit;
    let part = cast(part, unit.slots[index].elements.stored.dtype);
    let home = generation.home(index);
    if part.device() == home {
        return part;
    }
    unit.staging.moved(part, &home)
}
