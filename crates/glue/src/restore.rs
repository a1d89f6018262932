//! Restoring a sharded model and its optimizer from a saved step.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_fsdp_checkpoint::{ExpectedTensor, Extra, Region, Step, TensorEntry, TensorKind};
use burn_fsdp_shard::{LocalTensor, check_elementwise_once, load_local_state, local_state};
use serde_json::Value;

use crate::dtype::{burn_dtype, dtype_of};
use crate::error::CheckpointError;
use crate::optimizer_cut::{WholeState, cut_optimizer};
use crate::optimizer_record::{kept_in, owner_of};
use crate::snapshot::{ADAPTER_SCALE, region_of};
use crate::tied::Names;

/// Loads `step`, saved by any number of ranks, into a sharded model and its optimizer. Each rank reads only the bytes
/// that it needs.
///
/// Not collective: if one rank fails and continues with the unchanged values, the caller must make all ranks do so.
/// Configure `optimizer` like the saved one; its state is replaced. The optimizer is checked as in
/// [`snapshot`](crate::snapshot::snapshot).
///
/// # Errors
///
/// An optimizer that computes with whole tensors. Tensors of the model that the step lacks or has in another shape;
/// tensors of the step that the model lacks; adapters with another scale; damage. On an error, the model and its clones
/// are unchanged.
pub fn restore<M: Module>(
    model: M,
    optimizer: ModuleOptimizer,
    step: &Step,
) -> Result<(M, ModuleOptimizer), CheckpointError> {
    restore_training(model, optimizer, step, |_| true)
}

/// Restores a step that [`snapshot_matching`](crate::snapshot::snapshot_matching) captured: the parameters
/// and running states that `is_wanted` selects by path, and the whole optimizer state.
///
/// Not collective. `is_wanted` must select the same paths on all ranks. Otherwise like [`restore`].
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
    let optimizer = restore_optimizer(&model, &state, optimizer, step, |_| true)?;
    Ok((restore_matching(model, step, is_wanted)?, optimizer))
}

/// Loads the parameters and running states of `step` into a sharded model.
///
/// Not collective.
///
/// # Errors
///
/// As [`restore`].
pub fn restore_model<M: Module>(model: M, step: &Step) -> Result<M, CheckpointError> {
    restore_matching(model, step, |_| true)
}

/// Loads the parameters and running states of `step` that `is_wanted` selects by path into a sharded model, for example
/// a backbone without its head. Leaves the others unchanged.
///
/// Not collective. `is_wanted` must select the same paths on all ranks.
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
    let names: BTreeMap<_, _> = wanted
        .clone()
        .map(|tensor| {
            let names = Names::of(step, &tensor.path, &tensor.tied);
            (tensor.path.clone(), names)
        })
        .collect();
    let expected: Result<Vec<_>, CheckpointError> = wanted
        .flat_map(|tensor| {
            names[&tensor.path].all().map(|name| {
                Ok(ExpectedTensor {
                    name: name.to_owned(),
                    shape: tensor.shape.clone(),
                    dtype: Some(dtype_of(&tensor.path, tensor.dtype)?),
                })
            })
        })
        .collect();
    let is_compared = |tensor: &TensorEntry| tensor.kind.is_model() && is_wanted(&tensor.name);
    step.compare(&expected?, is_compared, Extra::Refuse)?;
    for tensor in state.iter().filter(|tensor| is_wanted(&tensor.path)) {
        check_scale(tensor, step.tensor(names[&tensor.path].first())?)?;
    }
    load_local_state(model, |tensor| {
        if is_wanted(&tensor.path) {
            Ok(Some(names[&tensor.path].read(step, &region_of(tensor))?))
        } else {
            Ok(None)
        }
    })
}

/// Checks that an adapter's factors have the scale that they were trained with.
fn check_scale(tensor: &LocalTensor, saved: &TensorEntry) -> Result<(), CheckpointError> {
    // Steps of other programs may lack the scale.
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

/// Loads this rank's part of a step's states into an optimizer, for the parameters that `is_wanted` selects by path.
pub(crate) fn restore_optimizer<M: Module>(
    model: &M,
    state: &[LocalTensor],
    optimizer: ModuleOptimizer,
    step: &Step,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<ModuleOptimizer, CheckpointError> {
    let mut states = Vec::new();
    let entries = step.index().tensors.iter();
    for entry in entries.filter(|entry| entry.kind == TensorKind::OptimizerState) {
        let (path, field) = owner_of(entry)?;
        if !is_wanted(path) {
            continue;
        }
        states.push(WholeState {
            name: entry.name.clone(),
            path: path.to_owned(),
            field: field.to_owned(),
            shape: entry.shape.clone(),
            dtype: burn_dtype(&entry.name, entry.dtype)?,
        });
    }
    let read = |state: &WholeState, range: Range<usize>| {
        let region = if range.len() == state.shape.iter().product::<usize>() {
            Region::whole(&state.shape)
        } else {
            Region::Flat(range)
        };
        Ok(step.read(&state.name, &region)?)
    };
    let mut kept = kept_in(step)?;
    kept.retain(|path, _| is_wanted(path));
    cut_optimizer(model, state, optimizer, states, kept, read)
}
