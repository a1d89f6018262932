//! A sharded model and its optimizer as they were when a step was saved.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, Shape};
use burn_fsdp_checkpoint::{ExpectedTensor, Extra, Region, Step, TensorEntry, TensorKind};
use burn_fsdp_shard::{
    LocalTensor, check_elementwise_once, load_local_state, local_ids, local_state,
};
use burn_pack::{Scalar, Tensor as PackedTensor};
use serde_json::Value;

use crate::dtype::{burn_dtype, dtype_of};
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{RANK_KEY, kept_in, owner_of, packed, with_state};
use crate::optimizer_state::{Holders, is_elsewhere};
use crate::snapshot::ADAPTER_SCALE;

/// Gives a sharded model, and the optimizer that trains it, the state of `step`, whatever the ranks
/// were that saved it. Each rank reads the bytes that it needs.
///
/// Not collective: ranks that meet an error and go on with what they had must see to it that all do.
/// `optimizer` is configured as the one that was saved; its state is replaced. It is tried as by
/// [`snapshot`](crate::checkpoint::snapshot()).
///
/// # Errors
///
/// An optimizer that computes with whole tensors. Tensors of the model that the step lacks or has in another shape,
/// tensors of the step that the model lacks, adapters of another alpha, damage: nothing is changed then, in no copy of the
/// model.
pub fn restore<M: Module>(
    model: M,
    optimizer: ModuleOptimizer,
    step: &Step,
) -> Result<(M, ModuleOptimizer), CheckpointError> {
    restore_training(model, optimizer, step, |_| true)
}

/// Gives a sharded model those parameters and running states of `step` whose path `is_wanted`, and the optimizer that trains it
/// all its state: what [`snapshot_matching`](crate::checkpoint::snapshot_matching) has taken.
///
/// Not collective. All ranks must want the same. Otherwise as [`restore`].
///
/// # Errors
///
/// As [`restore`], for the wanted tensors of model and step, and for every state of the optimizer.
pub fn restore_training<M: Module>(
    model: M,
    optimizer: ModuleOptimizer,
    step: &Step,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<(M, ModuleOptimizer), CheckpointError> {
    check_elementwise_once(&model, &optimizer)?;
    let state = local_state(&model)?;
    let optimizer = restore_optimizer(&model, &state, optimizer, step)?;
    Ok((restore_matching(model, step, is_wanted)?, optimizer))
}

/// Gives a sharded model the parameters and running states of `step`.
///
/// Not collective.
///
/// # Errors
///
/// As [`restore`].
pub fn restore_model<M: Module>(model: M, step: &Step) -> Result<M, CheckpointError> {
    restore_matching(model, step, |_| true)
}

/// Gives a sharded model those parameters and running states of `step` whose path `is_wanted`, and
/// leaves the others: a backbone without its head, say.
///
/// Not collective. All ranks must want the same.
///
/// # Errors
///
/// As [`restore`], for the wanted tensors of model and step.
pub fn restore_matching<M: Module>(
    model: M,
    step: &Step,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<M, CheckpointError> {
    let state = local_state(&model)?;
    let wanted = state.iter().filter(|tensor| is_wanted(&tensor.path));
    let expected: Result<Vec<_>, CheckpointError> = wanted
        .map(|tensor| {
            Ok(ExpectedTensor {
                name: tensor.path.clone(),
                shape: tensor.shape.clone(),
                dtype: Some(dtype_of(&tensor.path, tensor.dtype)?),
            })
        })
        .collect();
    let is_compared = |tensor: &TensorEntry| tensor.kind.is_model() && is_wanted(&tensor.name);
    step.compare(&expected?, is_compared, Extra::Refuse)?;
    for tensor in state.iter().filter(|tensor| is_wanted(&tensor.path)) {
        check_scale(tensor, step.tensor(&tensor.path)?)?;
    }
    load_local_state(model, |tensor| match is_wanted(&tensor.path) {
        true => Ok(Some(step.read(&tensor.path, &region_of(tensor))?)),
        false => Ok(None),
    })
}

/// Checks that the factors of an adapter are multiplied by what they were trained with.
fn check_scale(tensor: &LocalTensor, saved: &TensorEntry) -> Result<(), CheckpointError> {
    // Steps of other programs need not say.
    let saved = saved.metadata.get(ADAPTER_SCALE).and_then(Value::as_f64);
    match (saved, tensor.adapter_scale) {
        (Some(saved), Some(got)) if saved != got => Err(CheckpointError::AdapterScale {
            path: tensor.path.clone(),
            saved,
            got,
        }),
        _ => Ok(()),
    }
}

/// Returns the region of a tensor that a rank holds.
pub(crate) fn region_of(tensor: &LocalTensor) -> Region {
    Region::Flat(tensor.range())
}

fn restore_optimizer<M: Module>(
    model: &M,
    state: &[LocalTensor],
    optimizer: ModuleOptimizer,
    step: &Step,
) -> Result<ModuleOptimizer, CheckpointError> {
    let ids: HashMap<_, _> = local_ids(model)?
        .into_iter()
        .map(|local| (local.path, local.id.val()))
        .collect();
    let held: HashMap<_, _> = state.iter().map(|tensor| (&tensor.path, tensor)).collect();
    let mut tensors = Vec::new();
    let mut with_state_of = BTreeSet::new();
    let entries = step.index().tensors.iter();
    for entry in entries.filter(|entry| entry.kind == TensorKind::OptimizerState) {
        let (path, field) = owner_of(entry)?;
        let found = ids.get(path).zip(held.get(&path.to_owned()));
        let Some((id, local)) = found else {
            return Err(optimizer_error(format!(
                "`{}` of shape {:?} belongs to `{path}`, which the model has not",
                entry.name, entry.shape
            )));
        };
        if is_elsewhere(local) {
            continue;
        }
        let (region, shape) = match (local.shape == entry.shape, Holders::of(local)) {
            (true, _) => (region_of(local), local.shown_shape()),
            (false, Holders::All | Holders::Owner(_)) => {
                (Region::whole(&entry.shape), entry.shape.clone())
            }
            (false, Holders::Parts) => {
                return Err(optimizer_error(format!(
                    "`{}` has the shape {:?}, and `{path}`, to which it belongs, {:?}: it cannot be divided; \
                     give the parameter to one rank by `ShardPolicy::one_owner`",
                    entry.name, entry.shape, local.shape
                )));
            }
        };
        let bytes = Bytes::from_bytes_vec(step.read(&entry.name, &region)?);
        let dtype = burn_dtype(&entry.name, entry.dtype)?;
        let shape = Shape::from(shape);
        let name = format!("{id}.{field}");
        with_state_of.insert(path.to_owned());
        tensors.push(PackedTensor::new(name, dtype, shape, Some(*id), bytes));
    }
    let (mut scalars, mut paths) = (BTreeMap::new(), BTreeMap::new());
    for (path, kept) in kept_in(step)? {
        let Some(id) = ids.get(&path) else {
            let reason = format!("the step has state of `{path}`, which the model has not");
            return Err(optimizer_error(reason));
        };
        if held.get(&path).is_none_or(|local| is_elsewhere(local)) {
            continue;
        }
        if !kept.scalars.is_empty() {
            with_state_of.insert(path.clone());
        }
        for (field, number) in kept.scalars {
            scalars.insert(format!("{id}.{field}"), number.into());
        }
        if let Some(group) = kept.group_path {
            paths.insert(id.to_string(), group);
        }
    }
    for path in with_state_of {
        let dims = Scalar::from(held[&path].shown_shape().len());
        scalars.insert(format!("{}.{RANK_KEY}", ids[&path]), dims);
    }
    with_state(optimizer, packed(tensors, scalars, &paths)?)
}
