//! The states of optimizers in the types that they had when they were saved.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use burn::module::{Module, ParamId};
use burn::optim::{DynState, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, Tensor};
use burn_fsdp_shard::{LocalId, local_ids, local_state};
use burn_pack::{Reader, Tensor as PackedTensor};

use crate::error::{CheckpointError, optimizer_error};
use crate::followed::{Elements, Followed, State, as_configured, group_of};
use crate::optimizer_record::{OptimizerParts, RANK_KEY, check_taken, plainly, usual};
use crate::recorded::{Place, stepped, with_rank};

/// Gives an optimizer the state of a record, all of which it must take, in the types that it has there.
///
/// # Errors
///
/// A record of another optimizer; a state that cannot be put together in its type.
pub(crate) fn with_state(
    optimizer: ModuleOptimizer,
    parts: OptimizerParts,
) -> Result<ModuleOptimizer, CheckpointError> {
    check_taken(&optimizer, &parts)?;
    let others = of_other_types(&parts);
    if others.is_empty() {
        return plainly(optimizer, parts);
    }
    let (optimizer, states) = put_together(&optimizer, &others, &parts, Elements::Copied)?;
    let mut with_groups = optimizer.clone();
    for (place, rank, state) in states {
        let group = with_rank!(
            rank,
            D => group_of::<D>(&place),
            return Err(too_many_dims(&place, rank))
        );
        let (fields, numbers) = names_of(&parts, place.id);
        let followed = Followed {
            optimizer: optimizer.clone(),
            place,
            fields,
            numbers,
            first: Mutex::new(Some(state)),
        };
        with_groups = with_groups.with_group(group, followed, None);
    }
    // The others have their state already: what is left of them says that they have one, and of how many dims.
    let is_left = |name: &str| id_of(name).is_none_or(|id| !others.contains(&id));
    let is_rank = |name: &str| name.ends_with(RANK_KEY);
    let OptimizerParts {
        mut scalars,
        paths,
        mut tensors,
    } = parts;
    scalars.retain(|name, _| is_left(name) || is_rank(name));
    tensors.retain(|tensor| is_left(&tensor.name));
    plainly(
        with_groups,
        OptimizerParts {
            scalars,
            paths,
            tensors,
        },
    )
}

/// Gives an optimizer the state of a record in a file, as [`with_state`] does. On the CPU backend a tensor of Burn's usual type is
/// read when it is asked for, so the file has to stay until then.
#[cfg(feature = "train")]
pub(crate) fn with_state_of_file(
    optimizer: ModuleOptimizer,
    path: &std::path::Path,
) -> Result<ModuleOptimizer, CheckpointError> {
    let reader = Reader::from_file_exact(path).map_err(optimizer_error)?;
    let parts = OptimizerParts::of(reader)?;
    if !is_usual(&parts) {
        return with_state(optimizer, parts);
    }
    check_taken(&optimizer, &parts)?;
    let record = OptimizerRecord::load(path).map_err(optimizer_error)?;
    Ok(optimizer.load_record(record))
}

/// Checks that what an optimizer keeps of a model on these devices can be put together again, in its types: a training that is
/// saved may then be resumed.
///
/// # Errors
///
/// As [`with_state`], and as [`check_devices`].
pub(crate) fn check_comes_back(
    optimizer: &ModuleOptimizer,
    parts: &OptimizerParts,
    devices: &[Device],
) -> Result<(), CheckpointError> {
    check_devices(parts, devices)?;
    let others = of_other_types(parts);
    match others.is_empty() {
        true => Ok(()),
        false => put_together(optimizer, &others, parts, Elements::LeftOut).map(drop),
    }
}

/// Checks that what an optimizer will keep of a model can be put together again, after a step of an element of each trained
/// parameter that is of another type than Burn's.
///
/// # Errors
///
/// As [`check_comes_back`]; [`burn_fsdp_shard::Error::NotSharded`].
pub(crate) fn check_will_come_back<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
) -> Result<(), CheckpointError> {
    let types: BTreeMap<_, _> = local_state(model)?
        .into_iter()
        .filter(|local| local.dtype.is_float() && local.dtype != usual())
        .map(|local| (local.path, local.dtype))
        .collect();
    if types.is_empty() {
        return Ok(());
    }
    let (devices, empty) = (model.devices(), OptimizerRecord::default());
    let optimizer = optimizer.clone().load_record(empty);
    for LocalId { path, id, .. } in local_ids(model)? {
        let Some(dtype) = types.get(&path) else {
            continue;
        };
        let path = Some(path);
        let place = Place { id, path };
        let element = || Tensor::<1>::ones([1], (&Device::flex(), *dtype));
        // What it makes of a single element says nothing where it panics: the training will.
        let step = AssertUnwindSafe(|| stepped(optimizer.clone(), &place, 0.0, element(), element()));
        let Ok((stepped, _)) = catch_unwind(step) else {
            continue;
        };
        check_comes_back(&stepped, &OptimizerParts::take(&stepped)?, &devices)?;
    }
    Ok(())
}

/// Checks that states of other types than Burn's belong to a model on the host.
///
/// # Errors
///
/// Such a state, and another device.
pub(crate) fn check_devices(
    parts: &OptimizerParts,
    devices: &[Device],
) -> Result<(), CheckpointError> {
    let device = devices.iter().find(|device| **device != Device::flex());
    let Some((device, id)) = device.zip(of_other_types(parts).pop_first()) else {
        return Ok(());
    };
    let path = parts.paths.get(&id.to_string());
    Err(optimizer_error(format!(
        "what it keeps of `{}` is of {:?}, and Burn puts states together on {device:?} in {:?} alone; build the model in \
         that type, and let `ShardPolicy::precision` compute in another",
        path.map_or("", String::as_str),
        types_of(parts.tensors_of(id).map(|(_, tensor)| tensor)),
        usual()
    )))
}

fn types_of<'a>(tensors: impl Iterator<Item = &'a PackedTensor>) -> BTreeSet<String> {
    tensors
        .map(|tensor| format!("{:?}", tensor.dtype))
        .collect()
}

/// Returns true if Burn puts all states of a record together in the types that they have there.
pub(crate) fn is_usual(parts: &OptimizerParts) -> bool {
    of_other_types(parts).is_empty()
}

/// Returns the parameters that have a state of another type than Burn's.
fn of_other_types(parts: &OptimizerParts) -> BTreeSet<u64> {
    let usual = usual();
    let others = parts.tensors.iter().filter(|tensor| tensor.dtype != usual);
    others.filter_map(|tensor| id_of(&tensor.name)).collect()
}

/// Returns the id of the parameter that a name in a record begins with.
fn id_of(name: &str) -> Option<u64> {
    name.split_once('.')?.0.parse().ok()
}

type PutTogether = (Place, usize, DynState);

/// Returns the optimizer as it was configured, without state, and the states of these parameters.
fn put_together(
    optimizer: &ModuleOptimizer,
    ids: &BTreeSet<u64>,
    parts: &OptimizerParts,
    elements: Elements,
) -> Result<(ModuleOptimizer, Vec<PutTogether>), CheckpointError> {
    let optimizer = as_configured(optimizer, ids);
    let mut states = Vec::with_capacity(ids.len());
    for id in ids {
        let place = Place {
            id: ParamId::from(*id),
            path: parts.paths.get(&id.to_string()).cloned(),
        };
        let rank = parts.scalars_of(*id).find(|(field, _)| field == RANK_KEY);
        let tensors: Vec<_> = parts.tensors_of(*id).collect();
        let rank = rank.and_then(|(_, rank)| usize::try_from(rank).ok());
        let rank = rank.or(tensors.first().map(|(_, tensor)| tensor.shape.num_dims()));
        let rank = rank.unwrap_or_default();
        let scalars = parts.scalars_of(*id).filter(|(field, _)| field != RANK_KEY);
        let state = with_rank!(
            rank,
            D => State::<D>::of((&optimizer, &place), scalars.collect(), &tensors, elements),
            return Err(too_many_dims(&place, rank))
        );
        let state = state.map_err(|reason| {
            let types = types_of(tensors.iter().map(|(_, tensor)| *tensor));
            optimizer_error(format!(
                "what it keeps of `{}` is of {types:?}, and cannot be put together again: {reason}; build the model in \
                 {:?}, and let `ShardPolicy::precision` compute in another type",
                place.path.as_deref().unwrap_or_default(),
                usual()
            ))
        })?;
        states.push((place, rank, state));
    }
    Ok((optimizer, states))
}

fn too_many_dims(place: &Place, rank: usize) -> CheckpointError {
    optimizer_error(format!(
        "what it keeps of `{}` is of {rank} dims; 1 to 6 are put together in another type than {:?}",
        place.path.as_deref().unwrap_or_default(),
        usual()
    ))
}

/// Returns the fields of a parameter's state: of tensors, and of numbers.
fn names_of(parts: &OptimizerParts, id: ParamId) -> (Vec<String>, Vec<String>) {
    let tensors = parts.tensors_of(id.val()).map(|(field, _)| field);
    let scalars = parts.scalars_of(id.val()).map(|(field, _)| field);
    (
        tensors.collect(),
        scalars.filter(|field| field != RANK_KEY).collect(),
    )
}
