//! The state of an optimizer, cut to one rank's part of a sharded model.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, Shape};
use burn_fsdp_shard::{LocalTensor, local_ids};
use burn_pack::{Scalar, Tensor as PackedTensor};

use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, RANK_KEY, packed, with_state};
use crate::optimizer_state::{Holders, is_elsewhere};

/// A whole tensor of an optimizer's state.
pub(crate) struct WholeState {
    /// Name of the state, for errors and for the code that reads it.
    pub(crate) name: String,
    /// The path of the parameter.
    pub(crate) path: String,
    pub(crate) field: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

/// Loads this rank's part of `states` and `kept`, by path, into an optimizer. `read` returns the bytes of a range of a
/// state's flattened elements.
///
/// Not collective.
///
/// # Errors
///
/// States of parameters that the model lacks, or that cannot be divided; a state that the optimizer does not accept.
pub(crate) fn cut_optimizer<M: Module>(
    model: &M,
    locals: &[LocalTensor],
    optimizer: ModuleOptimizer,
    states: Vec<WholeState>,
    kept: BTreeMap<String, Kept>,
    read: impl Fn(&WholeState, Range<usize>) -> Result<Vec<u8>, CheckpointError>,
) -> Result<ModuleOptimizer, CheckpointError> {
    let ids: HashMap<_, _> = local_ids(model)?
        .into_iter()
        .map(|local| (local.path, local.id.val()))
        .collect();
    let held: HashMap<_, _> = locals.iter().map(|tensor| (&tensor.path, tensor)).collect();
    let mut tensors = Vec::new();
    let mut with_state_of = BTreeSet::new();
    for state in states {
        let found = ids.get(&state.path).zip(held.get(&state.path));
        let Some((id, local)) = found else {
            return Err(optimizer_error(format!(
                "`{}` of shape {:?} belongs to `{}`, which the model does not have",
                state.name, state.shape, state.path
            )));
        };
        if is_elsewhere(local) {
            continue;
        }
        let (range, shape) = match (local.shape == state.shape, Holders::of(local)) {
            (true, _) => (local.range(), local.shown_shape()),
            (false, Holders::All | Holders::Owner(_)) => {
                (0..state.shape.iter().product(), state.shape.clone())
            }
            (false, Holders::Parts) => {
                return Err(optimizer_error(format!(
                    "`{}` has shape {:?}, but its parameter `{}` has shape {:?}, so it cannot be divided; give the \
                     parameter to one rank with `ShardPolicy::one_owner`",
                    state.name, state.shape, state.path, local.shape
                )));
            }
        };
        let bytes = Bytes::from_bytes_vec(read(&state, range)?);
        let name = format!("{id}.{}", state.field);
        with_state_of.insert(state.path);
        let shape = Shape::from(shape);
        tensors.push(PackedTensor::new(
            name,
            state.dtype,
            shape,
            Some(*id),
            bytes,
        ));
    }
    let (mut scalars, mut paths) = (BTreeMap::new(), BTreeMap::new());
    for (path, kept) in kept {
        let Some(id) = ids.get(&path) else {
            let reason = format!("there is state of `{path}`, which the model does not have");
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
        // Without a path, Burn would match the parameter to no group in all later steps.
        let group = kept.group_path.unwrap_or_else(|| path.clone());
        paths.insert(id.to_string(), group);
    }
    for path in with_state_of {
        let dims = Scalar::from(held[&path].shown_shape().len());
        scalars.insert(format!("{}.{RANK_KEY}", ids[&path]), dims);
    }
    with_state(optimizer, packed(tensors, scalars, &paths)?)
}
