//! Loading of saved steps, of either engine, into compiled steps.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::TensorData;
use burn_fsdp_checkpoint::{ExpectedTensor, Extra, Layout, Region, Step, TensorEntry, TensorKind};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{LocalPart, LocalTensor, load_local_state, local_state};
use burn_fsdp_spmd::{BackendIr, Batch, CompiledStep, IdleState, IdleTensor, OptimizerState};

use crate::dtype::{burn_dtype, dtype_of};
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{RANK_KEY, kept_in, owner_of};
use crate::scaler::saved_scale;
use crate::snapshot::region_of;
use crate::tied::Names;

/// Loads the state of a saved step into a compiled step. Either engine may have saved it, on any number of ranks. Each
/// rank reads only the bytes that it needs. If the saved run and `step` both scale the loss, the saved scale is used.
///
/// Collective only if collectives were [moved](burn_fsdp_spmd::Mode::move_to_next_iteration). Configure the optimizer
/// like the saved one. States of parameters that are frozen in the step are kept, and saved with the next checkpoint.
///
/// # Errors
///
/// Tensors of the model that the saved step lacks or has in a different shape; tensors of the saved step that the model
/// lacks; damage; states that do not fit the optimizer, or that are incomplete. On an error, nothing is changed.
pub fn restore_compiled<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    saved: &Step,
) -> Result<(), CheckpointError> {
    restore_compiled_matching(step, saved, |_| true)
}

/// Loads into a compiled step the tensors of a saved step that `is_wanted` selects by path, and the whole optimizer
/// state, as taken by [`snapshot_compiled_matching`](crate::compiled_snapshot::snapshot_compiled_matching) or
/// [`snapshot_matching`](crate::snapshot::snapshot_matching). Other tensors stay unchanged.
///
/// `is_wanted` must select the same paths on all ranks. Otherwise like [`restore_compiled`].
///
/// # Errors
///
/// As [`restore_compiled`], for the wanted tensors, and for every state of the optimizer.
pub fn restore_compiled_matching<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    saved: &Step,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<(), CheckpointError> {
    let mut specs = step.parameters().to_vec();
    specs.retain(|spec| is_wanted(&spec.path));
    let names: Vec<_> = specs
        .iter()
        .map(|spec| Names::of(saved, &spec.path, &spec.tied))
        .collect();
    let expected = specs.iter().zip(&names).flat_map(|(spec, names)| {
        names.all().map(|name| {
            Ok(ExpectedTensor {
                name: name.to_owned(),
                shape: spec.shape.clone(),
                dtype: Some(dtype_of(&spec.path, spec.dtype)?),
            })
        })
    });
    let expected = expected.collect::<Result<Vec<_>, CheckpointError>>()?;
    let is_compared = |tensor: &TensorEntry| tensor.kind.is_model() && is_wanted(&tensor.name);
    saved.compare(&expected, is_compared, Extra::Refuse)?;
    let mut parameters = Vec::new();
    for (spec, names) in specs.iter().zip(&names) {
        let place = Place::of(step, &spec.path, &spec.shape)?;
        let bytes = names.read(saved, &place.region)?;
        let data = TensorData::from_bytes_vec(bytes, place.shape, spec.dtype);
        step.check_shard(&spec.path, &data)?;
        parameters.push((spec.path.to_string(), data));
    }
    let states = states_of(step, saved)?;
    step.resume_with(saved.index().training.step, states.own)?;
    if let (Some(_), Some(scale)) = (step.loss_scale(), saved_scale(saved)) {
        step.set_loss_scale(scale)?;
    }
    for (path, data) in parameters {
        step.set_shard(&path, data)?;
    }
    step.set_idle_states(states.idle);
    Ok(())
}

/// The optimizer's states in a step on disk.
struct States {
    /// The states of trained parameters, in the parts that this rank holds.
    own: Vec<OptimizerState>,
    /// The states of parameters that are frozen in this run, in flat shards.
    idle: Vec<IdleState>,
}

/// Reads the optimizer's states from a step on disk.
fn states_of<B: Batch, Be: BackendIr, O>(
    step: &CompiledStep<B, Be, O>,
    saved: &Step,
) -> Result<States, CheckpointError> {
    let specs = step.parameters();
    let (own_mesh, rank) = (step.mesh()?, step.rank());
    let mut idle: BTreeMap<String, IdleState> = BTreeMap::new();
    let new_idle = |path: &str| IdleState {
        path: path.to_owned(),
        counters: Vec::new(),
        tensors: Vec::new(),
    };
    let mut states: BTreeMap<String, OptimizerState> = BTreeMap::new();
    let new = |path: &str| OptimizerState {
        path: path.to_owned(),
        counters: Vec::new(),
        tensors: Vec::new(),
    };
    let entries = saved.index().tensors.iter();
    for entry in entries.filter(|entry| entry.kind == TensorKind::OptimizerState) {
        let (path, field) = owner_of(entry)?;
        let Some(spec) = specs.iter().find(|spec| *spec.path == *path) else {
            return Err(lacks(path, format!("`{}`", entry.name)));
        };
        if !spec.is_trained {
            let state = idle
                .entry(path.to_owned())
                .or_insert_with(|| new_idle(path));
            state
                .tensors
                .push(idle_tensor(saved, (entry, field), (&own_mesh, rank))?);
            continue;
        }
        let has_owner = step.layout(path)?.owner.is_some();
        let place = if spec.shape == entry.shape || has_owner {
            Place::of(step, path, &entry.shape)?
        } else {
            // A state of a different shape is whole on every rank.
            Place::whole(&entry.shape)
        };
        let bytes = saved.read(&entry.name, &place.region)?;
        let dtype = burn_dtype(&entry.name, entry.dtype)?;
        let data = TensorData::from_bytes_vec(bytes, place.shape, dtype);
        let state = states.entry(path.to_owned()).or_insert_with(|| new(path));
        state.tensors.push((field.to_owned(), data));
    }
    for (path, kept) in kept_in(saved)?
        .into_iter()
        .filter(|(_, kept)| !kept.scalars.is_empty())
    {
        let Some(spec) = specs.iter().find(|spec| *spec.path == *path) else {
            return Err(lacks(&path, "state".to_owned()));
        };
        let counters = if spec.is_trained {
            let state = states.entry(path.clone()).or_insert_with(|| new(&path));
            &mut state.counters
        } else {
            let state = idle.entry(path.clone()).or_insert_with(|| new_idle(&path));
            &mut state.counters
        };
        let numbers = kept
            .scalars
            .into_iter()
            .filter(|(name, _)| name != RANK_KEY);
        *counters = numbers
            .map(|(name, number)| (name, number.into()))
            .collect();
    }
    Ok(States {
        own: states.into_values().collect(),
        idle: idle.into_values().collect(),
    })
}

/// Reads this rank's shard of a state of a frozen parameter, flat along the first axis of a mesh.
fn idle_tensor(
    saved: &Step,
    (entry, field): (&TensorEntry, &str),
    (mesh, rank): (&Mesh, usize),
) -> Result<IdleTensor, CheckpointError> {
    let of_checkpoint = burn_fsdp_checkpoint::Error::from;
    let layout = Layout::flat(mesh, &mesh.axes()[0].name).map_err(of_checkpoint)?;
    let region = layout.region(&entry.shape, mesh, rank);
    let region = region.map_err(of_checkpoint)?;
    let bytes = saved.read(&entry.name, &region)?;
    let dtype = burn_dtype(&entry.name, entry.dtype)?;
    let len = bytes.len() / dtype.size();
    Ok(IdleTensor {
        slot: field.to_owned(),
        shape: entry.shape.clone(),
        layout,
        data: TensorData::from_bytes_vec(bytes, vec![len], dtype),
    })
}

fn lacks(path: &str, what: String) -> CheckpointError {
    optimizer_error(format!(
        "the step has {what} of `{path}`, which the model does not have; restore into the model that was saved"
    ))
}

/// This rank's region of a tensor, and its shape.
struct Place {
    region: Region,
    shape: Vec<usize>,
}

impl Place {
    fn whole(shape: &[usize]) -> Self {
        Self {
            region: Region::whole(shape),
            shape: shape.to_vec(),
        }
    }

    /// Returns the place of a tensor that is laid out like a parameter.
    fn of<B: Batch, Be: BackendIr, O>(
        step: &CompiledStep<B, Be, O>,
        path: &str,
        shape: &[usize],
    ) -> Result<Self, CheckpointError> {
        let layout = step.layout(path)?;
        if layout.is_whole() {
            return Ok(Self::whole(shape));
        }
        let (mesh, rank) = (step.mesh()?, step.rank());
        let of_checkpoint = burn_fsdp_checkpoint::Error::from;
        let region = layout.region(shape, &mesh, rank);
        let shape = layout.part_shape(shape, &mesh, rank);
        Ok(Self {
            region: region.map_err(of_checkpoint)?,
            shape: shape.map_err(of_checkpoint)?,
        })
    }
}

/// Copies the current parameters and buffers of a compiled step into a sharded model, to evaluate it or to continue
/// with the eager engine.
///
/// Collective: all ranks of the step's group call it. Parameters are gathered one at a time. A rank temporarily holds
/// new values of at most the size of the largest part of a tensor on any rank.
///
/// # Errors
///
/// A model that is not sharded; a path that the step lacks; a failed collective, after which other copies of the model
/// may have some of the new values.
pub fn load_compiled<M: Module, B: Batch, Be: BackendIr, O>(
    mut model: M,
    step: &mut CompiledStep<B, Be, O>,
) -> Result<M, CheckpointError> {
    let tensors = local_state(&model)?;
    // All ranks must form the same groups, so a group's size is the sum of the largest parts of its tensors: a rank's
    // own part may be smaller or empty.
    let most = |tensor: &LocalTensor| match &tensor.part {
        LocalPart::Shard { partition, .. } => partition.chunk_len() * tensor.dtype.size(),
        _ => tensor.elements.len(),
    };
    let largest = tensors.iter().map(most).max();
    let (mut groups, mut left) = (Vec::<Vec<String>>::new(), 0);
    for tensor in tensors {
        let len = most(&tensor);
        if len > left || groups.is_empty() {
            groups.push(Vec::new());
            left = largest.unwrap_or(0);
        }
        left -= len;
        if let Some(group) = groups.last_mut() {
            group.push(tensor.path);
        }
    }
    for group in groups {
        model = load_local_state(model, |tensor| {
            if group.contains(&tensor.path) {
                part_of(step, tensor)
            } else {
                Ok(None)
            }
        })?;
    }
    Ok(model)
}

/// Returns the bytes of this rank's part of a tensor, from a compiled step; `None` for a tensor that is not a
/// float.
fn part_of<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    tensor: &LocalTensor,
) -> Result<Option<Vec<u8>>, CheckpointError> {
    if !tensor.dtype.is_float() {
        return Ok(None);
    }
    let whole = step.parameter(&tensor.path)?;
    let Region::Flat(range) = region_of(tensor) else {
        return Ok(None);
    };
    let size = tensor.dtype.size();
    let bytes = whole.as_bytes();
    Ok(bytes
        .get(range.start * size..range.end * size)
        .map(Vec::from))
}
