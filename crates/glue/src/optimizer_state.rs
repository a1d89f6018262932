//! An optimizer's state for each parameter of a sharded model, on all ranks.

use std::collections::BTreeMap;

use burn::module::Module;
use burn_fsdp_checkpoint::Dtype;
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{LocalId, LocalPart, LocalTensor, owner_groups, shard_groups};
use burn_pack::Tensor as PackedTensor;
use serde::{Deserialize, Serialize};

use crate::dtype::dtype_of;
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, OptimizerParts, RANK_KEY, state_name};
use crate::rendezvous::exchange;

/// The state of one parameter, without its elements.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ParameterState {
    /// The non-tensor values.
    pub kept: Kept,
    /// The tensors, in the order of their fields.
    pub tensors: Vec<StateTensor>,
}

/// A tensor of a parameter's state.
#[derive(Debug, Serialize, Deserialize)]
pub struct StateTensor {
    /// Name of the field in the optimizer's record.
    pub field: String,
    /// Shape of the state on the rank that has it.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: Dtype,
}

impl ParameterState {
    /// Returns true if the optimizer keeps nothing for the parameter.
    pub fn is_empty(&self) -> bool {
        self.kept.scalars.is_empty() && self.tensors.is_empty()
    }
}

impl StateTensor {
    /// Returns the number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The ranks that hold a parameter and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holders {
    /// Every rank holds a part, so a state has an element for each of the parameter's elements.
    Parts,
    /// Every rank holds the whole parameter, so a state may have any shape.
    All,
    /// The rank with this number on the shard axis holds the whole parameter.
    Owner(usize),
}

impl Holders {
    /// Returns the holders of a parameter.
    pub fn of(local: &LocalTensor) -> Self {
        match &local.part {
            LocalPart::Shard { partition, .. } => match partition.sole_owner() {
                Some(owner) => Self::Owner(owner),
                None => Self::Parts,
            },
            // The optimizer sees a parameter with too many dims as a flat tensor.
            _ if local.shown_shape() != local.shape => Self::Parts,
            _ => Self::All,
        }
    }
}

/// Returns the error for a state whose shape does not match the number of the parameter's elements on this rank.
pub fn not_elementwise(name: &str, shape: &[usize], elements: usize) -> CheckpointError {
    optimizer_error(format!(
        "`{name}` has shape {shape:?}, but the parameter has {elements} elements here, and only element-wise state \
         can be divided among ranks; give the parameter to one rank with `ShardPolicy::one_owner`"
    ))
}

/// Returns true if another rank owns the parameter, so this rank holds none of it.
pub fn is_elsewhere(local: &LocalTensor) -> bool {
    matches!(Holders::of(local), Holders::Owner(_)) && local.elements.is_empty()
}

/// Returns the state of each parameter, by path: this rank's optimizer state, or the owner's for a parameter that
/// another rank owns.
///
/// Collective among the ranks of each group in which one rank owns a parameter.
///
/// # Errors
///
/// State of parameters that are not sharded, or of an unsupported type; a failed collective.
pub fn states<M: Module>(
    model: &M,
    parts: &OptimizerParts,
    ids: &[LocalId],
    locals: &BTreeMap<String, LocalTensor>,
) -> Result<BTreeMap<String, ParameterState>, CheckpointError> {
    let mut states = BTreeMap::new();
    let mut taken = 0;
    for id in ids {
        let state = state_of(parts, id)?;
        taken += state.tensors.len();
        states.insert(id.path.clone(), state);
    }
    let of_stand_in = |id: &&LocalId| parts.tensors_of(id.recorded.val()).next().is_some();
    if let Some(id) = ids.iter().find(of_stand_in) {
        return Err(optimizer_error(format!(
            "its state of `{}` has a different id from the parameter and was not trained: a record of a sharded model \
             was loaded before the model was sharded; shard first, then load",
            id.path
        )));
    }
    if taken != parts.tensors.len() {
        return Err(optimizer_error(format!(
            "{} tensors belong to parameters that are not sharded, so each rank has its own; shard these parameters",
            parts.tensors.len() - taken
        )));
    }
    for group in owner_groups(model) {
        let is_own = |path: &String| {
            let local = &locals[path];
            matches!(Holders::of(local), Holders::Owner(_)) && !is_elsewhere(local)
        };
        let own = states.iter().filter(|(path, _)| is_own(path));
        let own: BTreeMap<&String, &ParameterState> = own.collect();
        let own = serde_json::to_value(own).map_err(optimizer_error)?;
        for told in exchange(&group, "optimizer, states of owners", &own)? {
            let told = BTreeMap::<String, ParameterState>::deserialize(told);
            states.extend(told.map_err(optimizer_error)?);
        }
    }
    Ok(states)
}

/// Adds states for this rank's empty shards, for which its optimizer keeps none. Each is copied, without the elements,
/// from a rank that has elements of the parameter.
///
/// Collective over the ranks that hold parts of a parameter, if any rank has a shard without elements.
pub(crate) fn add_empty<M: Module>(
    model: &M,
    states: &mut BTreeMap<String, ParameterState>,
    locals: &BTreeMap<String, LocalTensor>,
) -> Result<(), CheckpointError> {
    let has_empty = |local: &LocalTensor| match &local.part {
        LocalPart::Shard { partition, .. } if partition.sole_owner().is_none() => {
            partition.ranges().any(|range| range.is_empty())
        }
        _ => false,
    };
    let mut groups: Vec<(ProcessGroup, Vec<String>)> = Vec::new();
    for (path, group) in shard_groups(model) {
        if !has_empty(&locals[&path]) {
            continue;
        }
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, paths)) => paths.push(path),
            None => groups.push((group, vec![path])),
        }
    }
    for (group, paths) in groups {
        let is_told = |path: &&String| !locals[*path].elements.is_empty();
        let own = paths.iter().filter(is_told);
        let own: BTreeMap<&String, &ParameterState> = own
            .filter_map(|path| Some((path, states.get(path)?)))
            .collect();
        let own = serde_json::to_value(own).map_err(optimizer_error)?;
        let told = exchange(&group, "optimizer, states of shards without elements", &own)?;
        for told in told {
            let told = BTreeMap::<String, ParameterState>::deserialize(told);
            for (path, mut state) in told.map_err(optimizer_error)? {
                let local = &locals[&path];
                if !local.elements.is_empty() || !paths.contains(&path) {
                    continue;
                }
                for tensor in &mut state.tensors {
                    tensor.shape = local.shown_shape();
                }
                states.insert(path, state);
            }
        }
    }
    Ok(())
}

fn state_of(parts: &OptimizerParts, id: &LocalId) -> Result<ParameterState, CheckpointError> {
    let number = id.id.val();
    let kept = kept_of(parts, number);
    let tensors = tensors_of(parts, number)
        .into_iter()
        .map(|(field, tensor)| {
            Ok(StateTensor {
                dtype: dtype_of(&state_name(&id.path, &field), tensor.dtype)?,
                shape: tensor.shape.to_vec(),
                field,
            })
        });
    Ok(ParameterState {
        kept,
        tensors: tensors.collect::<Result<_, CheckpointError>>()?,
    })
}

/// Returns the non-tensor values that an optimizer keeps for a parameter.
pub(crate) fn kept_of(parts: &OptimizerParts, id: u64) -> Kept {
    // The number of dims depends on the reader, which sets it.
    let scalars = parts.scalars_of(id).filter(|(field, _)| field != RANK_KEY);
    Kept {
        scalars: scalars
            .map(|(field, scalar)| (field, scalar.into()))
            .collect(),
        group_path: parts.paths.get(&id.to_string()).cloned(),
    }
}

/// Returns the tensors that an optimizer keeps for a parameter, in the order of their fields.
pub(crate) fn tensors_of(parts: &OptimizerParts, id: u64) -> Vec<(String, &PackedTensor)> {
    let mut tensors: Vec<_> = parts.tensors_of(id).collect();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors
}
