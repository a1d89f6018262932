//! Reductions that the policy's hooks perform instead of the engine.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{Account, ProcessGroup, Reduction as Averaging, RestKind};

use super::accumulate::Gradient;
use super::arrival::{Arrived, Whole, hooked};
use super::audited::{GivenGradient, Station};
use super::by_hook::ByHook;
use super::reduce::tell_whole;
use super::state::{Progress, Root};
use crate::audit::is_flagged;
use crate::copies::Generation;
use crate::error::Error;
use crate::hooks::{FullGradient, ReductionHook, ReductionStage, UnitReduction};
use crate::seal;
use crate::slot::Slots;
use crate::spec::averaging;

/// This rank's input to a hook, with its memory account; `None` if it has no gradient.
type Own = Option<(Tensor<1>, Option<Account>)>;

impl Progress {
    /// Calls the hook to reduce the gradients of a unit. The ranks first exchange which gradients they have, so all pass
    /// the same ones to the hook.
    pub(super) fn reduce_by(
        &mut self,
        root: &Root,
        hook: &ReductionHook,
        (generation, use_id): (&Arc<Generation>, u64),
        slots: &[usize],
        gradients: &mut Slots<Gradient>,
    ) -> Result<ByHook, Error> {
        let unit = &generation.unit;
        let group = &unit.groups.reduce;
        let mut given = Vec::with_capacity(slots.len());
        let mut own = Vec::with_capacity(slots.len());
        for &index in slots {
            let gradient = gradients[index].take();
            let from = Station::Use(use_id);
            given.push(GivenGradient::of((unit, index), from, gradient.as_ref()));
            own.push(match gradient {
                Some(gradient) => Some(hooked(gradient, &unit.slots[index], unit)?),
                None => None,
            });
        }
        let note = self.unit_note(unit, &given);
        let label = root.label(format_args!(
            "{} gradients of ranks, values {:08x},{}",
            unit.label(),
            generation.fingerprint(),
            generation.refrozen(false)
        ));
        let pending = group.start_exchange(label, note)?;
        self.audited.carries(Some(unit), pending.operation());
        let notes = pending.wait()?;
        self.early.hear(unit, &notes);
        let leaves = slots.iter().map(|&slot| (&**generation, slot));
        let own = own.into_iter().map(given_to_hook);
        let reduction = root.reduction_by_hook(
            (ReductionStage::Shards, unit.label()),
            group,
            unit.averaging(),
        );
        started_by(hook, reduction, leaves.zip(own), notes)
    }

    /// Calls the hook to sum the shards' gradients over all replicas. The ranks first exchange which gradients they
    /// have.
    pub(super) fn cross_by(
        &mut self,
        root: &Root,
        (hook, replicas): (&ReductionHook, &ProcessGroup),
        generation: &Generation,
        slots: &[usize],
        mut waiting: Slots<Tensor<1>>,
    ) -> Result<Arrived, Error> {
        let unit = &generation.unit;
        let mut given = Vec::with_capacity(slots.len());
        let mut own = Vec::with_capacity(slots.len());
        for &index in slots {
            let sum = waiting[index].take();
            if let Some(sum) = &sum {
                seal::check(&unit.seals, seal::place(index, RestKind::Sum), sum)?;
            }
            given.push(GivenGradient::of((unit, index), Station::Sum, sum.as_ref()));
            own.push(sum);
        }
        let note = self.unit_note(unit, &given);
        let label = root.label(format_args!("{} gradients of replicas", unit.label()));
        let pending = replicas.start_exchange(label, note)?;
        self.audited.carries(Some(unit), pending.operation());
        let notes = pending.wait()?;
        self.early.hear(unit, &notes);
        let leaves = slots.iter().map(|&slot| (generation, slot));
        let own = own.into_iter().map(|own| own.map(|own| (own, None)));
        let reduction = root.reduction_by_hook(
            (ReductionStage::Replicas, unit.label()),
            replicas,
            Averaging::sum(),
        );
        started_by(hook, reduction, leaves.zip(own), notes)?.wait()
    }

    /// Averages gradients of parameters kept whole, like [`average_whole`](Self::average_whole), by the hook. The ranks
    /// first exchange `note`.
    pub(super) fn average_whole_by(
        &mut self,
        root: &Root,
        hook: &ReductionHook,
        note: Vec<u8>,
        whole: Vec<Whole>,
        of_reduction: impl FnOnce(&[Vec<u8>]) -> Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let label = root.label(format_args!("parameters kept whole, gradients of ranks"));
        let pending = root.group.start_exchange(label, note)?;
        self.audited.carries(None, pending.operation());
        let notes = pending.wait()?;
        let factors = whole.first().and_then(Whole::factors);
        let (leaves, own): (Vec<_>, Vec<_>) = whole
            .into_iter()
            .map(|whole| ((whole.generation, whole.slot), whole.own))
            .unzip();
        tell_whole(root, &leaves);
        let reduction = root.reduction_by_hook(
            (ReductionStage::Whole, "root".to_owned()),
            &root.group,
            averaging(root.group.size(), factors),
        );
        let of = leaves
            .iter()
            .map(|(generation, slot)| (&**generation, *slot));
        let own = own.into_iter().map(given_to_hook);
        let by_hook = started_by(hook, reduction, of.zip(own), of_reduction(&notes))?;
        self.take_whole_in(root, &leaves, by_hook.wait()?)?;
        Ok(notes)
    }
}

impl Root {
    /// Returns a reduction by a hook, without gradients.
    fn reduction_by_hook(
        &self,
        (stage, unit): (ReductionStage, String),
        group: &ProcessGroup,
        mean: Averaging,
    ) -> UnitReduction {
        let what = match stage {
            ReductionStage::Shards => "reduction",
            ReductionStage::Replicas => "reduction over replicas",
            ReductionStage::Whole => "reduction of parameters kept whole",
        };
        UnitReduction {
            label: self.label(format_args!("{unit} {what} by the hook")),
            unit,
            stage,
            group: group.clone(),
            pool: self.reduced.clone(),
            mean,
            divisor: 1.0 / (mean.pre_scale * mean.post_scale),
            gradients: Vec::new(),
        }
    }
}

fn given_to_hook(own: Option<Gradient>) -> Own {
    own.map(|own| (own.tensor, Some(own.account)))
}

/// Calls `hook` with the gradients that any rank has according to the ranks' notes.
fn started_by<'a>(
    hook: &ReductionHook,
    mut reduction: UnitReduction,
    gradients: impl Iterator<Item = ((&'a Generation, usize), Own)>,
    notes: Vec<Vec<u8>>,
) -> Result<ByHook, Error> {
    let mut accounts = Vec::new();
    let mut number = 0;
    for (place, (leaf, own)) in gradients.enumerate() {
        number = place + 1;
        if is_flagged(&notes, place) {
            let (tensor, account) = own.unzip();
            accounts.extend(account.flatten());
            let gradient = full_gradient(leaf, reduction.stage, tensor);
            reduction.gradients.push(gradient);
        }
    }
    Ok(ByHook {
        notes,
        number,
        reduction: (reduction.mean, reduction.group.size()),
        parts: hook.call(reduction)?,
        accounts,
    })
}

/// Returns this rank's gradient for the hook, or zeros if it has none.
fn full_gradient(
    (generation, index): (&Generation, usize),
    stage: ReductionStage,
    own: Option<Tensor<1>>,
) -> FullGradient {
    let unit = &generation.unit;
    let slot = &unit.slots[index];
    let held = slot.held_range(unit.groups.shard.rank());
    let tensor = own.unwrap_or_else(|| match stage {
        ReductionStage::Shards | ReductionStage::Whole => {
            let device = generation.device(index).without_autodiff();
            let elements = slot.partition.num_elements();
            Tensor::zeros([elements], (&device, slot.elements.reduce.dtype))
        }
        ReductionStage::Replicas => {
            let device = generation.home(index);
            Tensor::zeros([held.len()], (&device, slot.elements.stored.dtype))
        }
    });
    let is_scattered = stage == ReductionStage::Shards && slot.is_gathered();
    FullGradient {
        path: slot.path.clone(),
        shape: slot.shape.clone(),
        tensor,
        partition: is_scattered.then_some(slot.partition),
        held,
    }
}
