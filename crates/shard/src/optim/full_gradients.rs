//! Whole gradients, for a plain copy of the module, and the way back.

use std::collections::VecDeque;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Shape, Tensor};
use burn_fsdp_collectives::ProcessGroup;

use super::gradients::{Parameter, Share, for_each, is_same};
use crate::convert::cast;
use crate::error::Error;
use crate::inspect::{self, Member};
use crate::shown::plain;
use crate::state::record;

/// Returns the whole gradients of a sharded module, for the plain copy of it that
/// [`summon_full_params`](crate::summon_full_params) passes on: each has its parameter's shape and stored type, and
/// the id of the copy's parameter. Returns `None` on ranks that do not set `keep`; these hold at most one whole gradient
/// at a time.
///
/// Gradients of parameters that no unit manages are this rank's own. The gradients of a low-rank adapter's factors are
/// included under the ids of the factors, which a merged copy lacks. [`shard_gradients`] is the inverse.
///
/// Collective over all ranks of the module, between backward and the optimizer's step: one exchange, and one all-gather
/// for each sharded parameter that has a gradient.
///
/// # Errors
///
/// [`Error::NotSharded`]; a failed collective.
pub fn full_gradients<M: Module>(
    module: &M,
    gradients: &GradientsParams,
    keep: bool,
) -> Result<Option<GradientsParams>, Error> {
    inspect::root_of(module)?;
    let mut exist = Existing::exchanged(module, gradients)?;
    let mut full = GradientsParams::new();
    let mut result = Ok(());
    for_each(module, |parameter| {
        if result.is_ok() {
            result = gather(parameter, gradients, &mut exist, keep.then_some(&mut full));
        }
    });
    result.map(|()| keep.then_some(full))
}

/// Gathers the gradient of one parameter, and registers it in `full` for a plain copy of the module.
fn gather(
    parameter: &Parameter<'_>,
    gradients: &GradientsParams,
    exist: &mut Existing,
    full: Option<&mut GradientsParams>,
) -> Result<(), Error> {
    let own = parameter.gradient(gradients).map(plain);
    let whole = match (parameter.share(), parameter.member) {
        (Share::Shard(group), Some(member)) if exist.next(&group) => {
            let (generation, index) = (&member.generation, member.index);
            let part = own.unwrap_or_else(|| no_part_of(member));
            let part = cast(part, member.slot().elements.stored.dtype);
            record::joined(generation, index, "whole gradient", part)?
        }
        (Share::Shard(_), _) => return Ok(()),
        (Share::Everywhere | Share::Local, _) => match own {
            Some(own) => own,
            None => return Ok(()),
        },
    };
    if let Some(full) = full {
        let shape = match parameter.member {
            Some(member) => member.slot().shape.clone().into(),
            None => parameter.shape(gradients).unwrap_or_else(|| whole.shape()),
        };
        parameter.register_plain(full, whole, shape);
    }
    Ok(())
}

/// Returns this rank's part of a gradient that only other ranks have.
fn no_part_of(member: &Member) -> Tensor<1> {
    let elements = member
        .slot()
        .held_range(member.generation.unit.groups.shard.rank());
    Tensor::zeros(
        [elements.len()],
        (
            &member.generation.home(member.index),
            member.slot().elements.stored.dtype,
        ),
    )
}

/// Whether any rank has the gradient of each sharded parameter, by shard group, in module order.
struct Existing(Vec<(ProcessGroup, VecDeque<bool>)>);

impl Existing {
    /// Exchanges which gradients the ranks have, with one exchange for each group. The gradient of a parameter with one
    /// owner exists only there, so the others do not know whether it exists.
    fn exchanged<M: Module>(module: &M, gradients: &GradientsParams) -> Result<Self, Error> {
        let mut own: Vec<(ProcessGroup, Vec<u8>)> = Vec::new();
        for_each(module, |parameter| {
            let Share::Shard(group) = parameter.share() else {
                return;
            };
            let flag = u8::from(parameter.gradient(gradients).is_some());
            match own.iter_mut().find(|(known, _)| is_same(known, &group)) {
                Some((_, flags)) => flags.push(flag),
                None => own.push((group, vec![flag])),
            }
        });
        let all = own.into_iter().map(|(group, flags)| {
            let of_ranks = group.exchange("whole gradients", flags.clone())?;
            let exists = |place| {
                let mut flags = of_ranks.iter().filter_map(|flags| flags.get(place));
                flags.any(|&flag| flag == 1)
            };
            let exist = (0..flags.len()).map(exists).collect();
            Ok((group, exist))
        });
        Ok(Self(all.collect::<Result<_, Error>>()?))
    }

    /// Returns whether any rank of `group` has the next gradient.
    fn next(&mut self, group: &ProcessGroup) -> bool {
        let known = self.0.iter_mut().find(|(known, _)| is_same(known, group));
        known
            .and_then(|(_, exist)| exist.pop_front())
            .unwrap_or_default()
    }
}

/// Returns this rank's parts of whole gradients, for the optimizer of the sharded module. `full` has the gradients of a
/// plain copy of the module, as [`full_gradients`] returns them, perhaps changed. All ranks must pass the same ones;
/// otherwise the parts of different gradients would be combined.
///
/// Gradients of parameters that no unit manages are kept. Gradients that belong to no parameter of `module` are dropped.
///
/// Not collective.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Returned`] for a gradient whose shape is not its parameter's.
pub fn shard_gradients<M: Module>(
    module: &M,
    mut full: GradientsParams,
) -> Result<GradientsParams, Error> {
    let roots = inspect::roots_of(module)?;
    let mut gradients = GradientsParams::new();
    let mut result = Ok(());
    for_each(module, |parameter| {
        let Some(member) = parameter.member else {
            return parameter.transfer(&mut full, &mut gradients);
        };
        if result.is_err() {
            return;
        }
        result = part_of(parameter, member, &full).and_then(|part| {
            let Some((part, shape)) = part else {
                return Ok(());
            };
            parameter.changed_sealed(&roots, &mut gradients, "the new gradient", |gradients| {
                parameter.register(gradients, part, shape);
                parameter.file(gradients)
            })
        });
    });
    result.map(|()| gradients)
}

/// Returns this rank's part of the whole gradient of `member`, and the shape in which optimizers see it. Returns `None`
/// if there is no gradient, or another rank owns the parameter.
fn part_of(
    parameter: &Parameter<'_>,
    member: &Member,
    full: &GradientsParams,
) -> Result<Option<(Tensor<1>, Shape)>, Error> {
    let (slot, unit) = (member.slot(), &member.generation.unit);
    let Some((shape, whole)) = parameter.plain_gradient(full) else {
        return Ok(None);
    };
    if shape[..] != slot.shape[..] {
        return Err(Error::Returned {
            path: parameter.path.to_owned(),
            expected: format!("a gradient of shape {:?}", slot.shape),
            got: format!("a gradient of shape {:?}", shape.to_vec()),
        });
    }
    if slot.is_elsewhere(unit.groups.shard.rank()) {
        return Ok(None);
    }
    let device = member.generation.device(member.index).without_autodiff();
    let part = record::narrow(unit, member.index, plain(whole), &device);
    let shape = if slot.is_flattened() {
        part.shape()
    } else {
        shape
    };
    Ok(Some((part, shape)))
}
