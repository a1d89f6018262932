//! Compiled steps in the checkpoints of sharded training runs. A run may begin with the eager engine and continue
//! compiled, or vice versa, on any number of ranks and any backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::TensorData;
use burn_fsdp_checkpoint::{
    ExpectedTensor, Extra, Layout, Region, Snapshot, Step, TensorEntry, TensorKind, TensorSpec,
    WritePlan,
};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{LocalPart, LocalTensor, load_local_state, local_state};
use burn_fsdp_spmd::trace::ParameterSpec;
use burn_fsdp_spmd::{BackendIr, Batch, CompiledStep, IdleState, IdleTensor, OptimizerState};
use burn_pack::Scalar;

use crate::dtype::{burn_dtype, dtype_of};
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, RANK_KEY, kept_in, owner_of, state_name};
use crate::restore::region_of;
use crate::scaler::saved_scale;
use crate::snapshot::{Elements, TrainingSnapshot};
use crate::tied::{self, Names};

/// Takes a snapshot of a compiled step, as [`snapshot`](crate::snapshot::snapshot) does for a sharded model and its
/// optimizer, in the same form: either engine can continue from it, on any backend. `mesh` contains all ranks that
/// save, and `axis` is the axis of `mesh` for the step's group. A step with placements has its own mesh, and `mesh`
/// must have axes of the same names.
///
/// All ranks must take their snapshots at the same point. This is collective only if collectives were
/// [moved](burn_fsdp_spmd::Mode::move_to_next_iteration). Buffers that differ between ranks, such as the running
/// statistics of a data-parallel step, are saved from the first rank.
///
/// # Errors
///
/// A tensor whose type checkpoints do not support; a `mesh` that lacks an axis of the step; a step whose state cannot
/// be read.
pub fn snapshot_compiled<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    mesh: &Mesh,
    axis: &str,
) -> Result<TrainingSnapshot, CheckpointError> {
    snapshot_compiled_matching(step, mesh, axis, |_| true)
}

/// Takes a snapshot of the tensors of a compiled step that `is_wanted` selects by path, and of the optimizer's state
/// for them, for example of adapters without the frozen weights. [`restore_compiled_matching`] restores it. The form is
/// the same as with [`snapshot_matching`](crate::snapshot::snapshot_matching), except that it lacks the
/// scale of adapters, which a compiled step does not have.
///
/// `is_wanted` must select the same paths on all ranks. Otherwise like [`snapshot_compiled`].
///
/// # Errors
///
/// As [`snapshot_compiled`].
pub fn snapshot_compiled_matching<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    mesh: &Mesh,
    axis: &str,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<TrainingSnapshot, CheckpointError> {
    let mut specs = Vec::new();
    let mut snapshot = Snapshot::new();
    let mut kept: BTreeMap<String, Kept> = BTreeMap::new();
    let mut regions = Vec::new();
    let wanted = step.parameters().iter();
    let wanted: Vec<_> = wanted
        .filter(|spec| is_wanted(&spec.path))
        .cloned()
        .collect();
    for parameter in wanted {
        let ParameterSpec {
            path,
            tied: paths,
            shape,
            dtype,
            is_trained,
            ..
        } = parameter;
        let path = path.to_string();
        let held = step.layout(&path)?;
        let layout = layout_of(step, (&path, &held), (mesh, axis))?;
        let is_own = !is_trained && held.is_whole();
        regions.push(regions_of(mesh, &layout, &shape, is_own)?);
        let layout = listed(layout);
        let kind = if is_trained {
            TensorKind::Parameter
        } else {
            TensorKind::Buffer
        };
        let dtype = dtype_of(&path, dtype)?;
        let spec = TensorSpec::new(&path, shape.clone(), dtype, kind, layout.clone());
        specs.push(tied::with_paths(spec, &paths));
        snapshot.insert(&path, Elements(step.shard(&path)?));
        if !is_trained {
            let idle = step.idle_states().iter();
            for state in idle.filter(|state| state.path == path) {
                kept.insert(path.clone(), kept_of(&path, &state.counters));
                for tensor in &state.tensors {
                    let layout = layout_of(step, (&path, &tensor.layout), (mesh, axis))?;
                    regions.push(regions_of(mesh, &layout, &tensor.shape, false)?);
                    let of = (tensor.shape.as_slice(), listed(layout));
                    let spec = state_spec(&path, &tensor.slot, of, &tensor.data)?;
                    snapshot.insert(spec.name.clone(), Elements(tensor.data.clone()));
                    specs.push(spec);
                }
            }
            continue;
        }
        let states = step.state_shards(&path)?;
        let counters = step.counters(&path).unwrap_or_default();
        kept.insert(path.clone(), kept_of(&path, counters));
        for (field, data) in states {
            let (shape, held) = step.state_place(&path, &field)?;
            let layout = layout_of(step, (&path, &held), (mesh, axis))?;
            regions.push(regions_of(mesh, &layout, &shape, false)?);
            let spec = state_spec(&path, &field, (&shape, listed(layout)), &data)?;
            snapshot.insert(spec.name.clone(), Elements(data));
            specs.push(spec);
        }
    }
    Ok(TrainingSnapshot {
        plan: Arc::new(WritePlan::of_regions(mesh, specs, regions)?),
        snapshot,
        optimizer: serde_json::to_value(kept).map_err(optimizer_error)?,
    })
}

/// Returns an optimizer's non-tensor state for a parameter: its numbers, and the path that selects the group.
fn kept_of(path: &str, counters: &[(String, Scalar)]) -> Kept {
    let scalars = counters.iter();
    let scalars = scalars.map(|(name, scalar)| (name.clone(), (*scalar).into()));
    Kept {
        scalars: scalars.collect(),
        group_path: Some(path.to_owned()),
    }
}

/// Describes a tensor of the optimizer's state with its whole shape, its layout, and the type of `data`, a part of it.
fn state_spec(
    path: &str,
    field: &str,
    (shape, layout): (&[usize], Layout),
    data: &TensorData,
) -> Result<TensorSpec, CheckpointError> {
    let name = state_name(path, field);
    let dtype = dtype_of(&name, data.dtype())?;
    let spec = TensorSpec::new(&name, shape, dtype, TensorKind::OptimizerState, layout);
    Ok(spec.with("path", path).with("field", field))
}

/// Converts a layout on a step's mesh to one on a checkpoint's mesh. If the step has only one axis, it is `axis` in the
/// checkpoint, whatever its name in the step.
fn layout_of<B: Batch, Be: BackendIr, O>(
    step: &CompiledStep<B, Be, O>,
    (path, held): (&str, &Layout),
    (mesh, axis): (&Mesh, &str),
) -> Result<Layout, CheckpointError> {
    let mut layout = Layout::replicated(mesh);
    if held.is_whole() {
        return Ok(layout);
    }
    (layout.cut, layout.owner) = (held.cut, held.owner);
    let own = step.mesh()?;
    for (held, placement) in own.axes().iter().zip(&held.placements) {
        let name = match own.axes().len() {
            1 => axis,
            _ => &held.name,
        };
        // If the mesh lacks the axis, the error names both.
        let on_mesh = mesh.axis(name).map_err(burn_fsdp_checkpoint::Error::from)?;
        if on_mesh.size != held.size {
            return Err(CheckpointError::OtherMesh {
                path: path.to_owned(),
                ranks: held.size,
                axis: name.to_owned(),
                got: on_mesh.size,
            });
        }
        let axes = mesh.axes().iter().zip(&mut layout.placements);
        for (_, on) in axes.filter(|(axis, _)| axis.name == *name) {
            *on = *placement;
        }
    }
    Ok(layout)
}

/// Returns a tensor's layout as a checkpoint lists it, as in the eager engine: a tensor with one owner has one part.
fn listed(layout: Layout) -> Layout {
    Layout {
        owner: None,
        ..layout
    }
}

/// Returns the region of a tensor that each rank writes. If each rank has its own version of a tensor, only rank 0
/// writes it.
fn regions_of(
    mesh: &Mesh,
    layout: &Layout,
    shape: &[usize],
    is_own: bool,
) -> Result<Vec<Region>, CheckpointError> {
    let region = |rank: usize| {
        if is_own && rank > 0 {
            Ok(Region::Flat(0..0))
        } else {
            layout.region(shape, mesh, rank)
        }
    };
    let regions = (0..mesh.size()).map(region);
    let regions: Result<_, _> = regions.collect();
    Ok(regions.map_err(burn_fsdp_checkpoint::Error::from)?)
}

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
/// state, as taken by [`snapshot_compiled_matching`] or
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
