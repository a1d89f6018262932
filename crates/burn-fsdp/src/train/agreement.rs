//! What processes must say alike of one training, each of which has made it for itself.

use std::hash::Hash;

use burn::module::{Module, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::train::LearnerModel;
use burn_fsdp_collectives::{Fingerprint, ProcessGroup};
use burn_fsdp_shard::local_ids;

use crate::error::{Error, optimizer_error};
use crate::optimizer_record::OptimizerParts;
use crate::train::course::Course;
use crate::train::stop::exchanged;

/// Checks that all ranks are about to train the same. What differs is refused by its name.
///
/// The values of the model need not agree: all ranks get those of rank 0. Neither is the optimizer compared, of which Burn
/// shows nothing but its state.
///
/// Collective.
pub(crate) fn check_same<M: LearnerModel>(
    world: &ProcessGroup,
    course: &Course<M>,
    model: &M,
    state: &OptimizerParts,
) -> Result<(), Error> {
    let text = |what: &dyn std::fmt::Debug| Fingerprint::of(&format!("{what:?}"));
    let own = [
        ("the epochs", text(&course.epochs)),
        ("the accumulation", text(&course.accumulation)),
        ("whether epochs are saved", text(&course.saves)),
        ("the number of items", text(&course.items)),
        (
            "the number of validated items",
            text(&course.validated_items),
        ),
        ("the clipping", text(&course.settings.clip)),
        ("the model's layers", Fingerprint::of(&model.to_string())),
        ("the optimizer's state", of_state(state)?),
    ];
    let sums: Vec<u64> = own.iter().map(|(_, sum)| *sum).collect();
    let all: Vec<Vec<u64>> = exchanged(world, "agreement on a training", &sums)?;
    for (index, (what, sum)) in own.into_iter().enumerate() {
        let other = all.iter().position(|of| of.get(index) != Some(&sum));
        if let Some(rank) = other {
            return Err(Error::OtherTraining { what, rank });
        }
    }
    Ok(())
}

/// Returns the fingerprint of an optimizer's state. Parameters have other ids in each process, and the same order.
fn of_state(state: &OptimizerParts) -> Result<u64, Error> {
    let mut sum = Fingerprint::new();
    let mut scalars: Vec<_> = state
        .scalars
        .iter()
        .map(|(name, number)| (field(name), format!("{number:?}")))
        .collect();
    scalars.sort();
    scalars.hash(&mut sum);
    let mut tensors = Vec::new();
    for tensor in &state.tensors {
        let bytes = tensor.to_bytes().map_err(optimizer_error)?;
        let shape = tensor.shape.to_vec();
        tensors.push((field(&tensor.name), shape, Fingerprint::of(&bytes[..])));
    }
    tensors.sort();
    tensors.hash(&mut sum);
    Ok(std::hash::Hasher::finish(&sum))
}

/// Returns a name without the id of its parameter.
fn field(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, field)| field)
}

/// The parameters whose learning rates are compared.
pub(crate) struct Rates(Vec<(ParamId, String)>);

impl Rates {
    pub(crate) fn of<M: Module>(model: &M) -> Result<Self, Error> {
        let ids = local_ids(model)?.into_iter();
        Ok(Self(ids.map(|ids| (ids.id, ids.path)).collect()))
    }

    /// Returns the fingerprint of the rates of all parameters. Before the first step there are none.
    pub(crate) fn fingerprint(&self, rates: &ModuleLearningRate) -> u64 {
        let of = |(id, path): &(ParamId, String)| rates.lr_from_param(*id, Some(path)).to_bits();
        Fingerprint::of(&self.0.iter().map(of).collect::<Vec<_>>())
    }
}
