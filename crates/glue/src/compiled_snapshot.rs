//! Snapshots of compiled steps, in the form of the eager engine's. A run may begin with the eager engine and continue
//! compiled, or vice versa, on any number of ranks and any backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::TensorData;
use burn_fsdp_checkpoint::{Layout, Region, Snapshot, TensorKind, TensorSpec, WritePlan};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_spmd::trace::ParameterSpec;
use burn_fsdp_spmd::{BackendIr, Batch, CompiledStep};
use burn_pack::Scalar;

use crate::dtype::dtype_of;
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, state_name};
use crate::snapshot::{Elements, TrainingSnapshot};
use crate::tied;

/// Takes a snapshot of a compiled step, as [`snapshot`](crate::snapshot::snapshot) does for a sharded model and its
/// optimizer, in the same form: either engine can continue from it, on any backend. `mesh` contains all ranks that
/// save, and `axis` is the axis of `mesh` for the step's group; the save fails on others. A step with placements has
/// its own mesh, and `mesh` must have axes of the same names.
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
/// for them, for example of adapters without the frozen weights.
/// [`restore_compiled_matching`](crate::compiled_restore::restore_compiled_matching) restores it. The form is the same
/// as with [`snapshot_matching`](crate::snapshot::snapshot_matching), except that it lacks the scale of adapters, which
/// a compiled step does not have.
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
        let own = own_region(step, &held, &shape)?;
        snapshot.insert(&path, own, Elements(step.shard(&path)?));
        if !is_trained {
            let idle = step.idle_states().iter();
            for state in idle.filter(|state| state.path == path) {
                kept.insert(path.clone(), kept_of(&path, &state.counters));
                for tensor in &state.tensors {
                    let layout = layout_of(step, (&path, &tensor.layout), (mesh, axis))?;
                    regions.push(regions_of(mesh, &layout, &tensor.shape, false)?);
                    let of = (tensor.shape.as_slice(), listed(layout));
                    let spec = state_spec(&path, &tensor.slot, of, &tensor.data)?;
                    let own = own_region(step, &tensor.layout, &tensor.shape)?;
                    snapshot.insert(&spec.name, own, Elements(tensor.data.clone()));
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
            let own = own_region(step, &held, &shape)?;
            snapshot.insert(&spec.name, own, Elements(data));
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

/// Returns the region of a tensor that this rank of the step holds.
fn own_region<B: Batch, Be: BackendIr, O>(
    step: &CompiledStep<B, Be, O>,
    held: &Layout,
    shape: &[usize],
) -> Result<Region, CheckpointError> {
    if held.is_whole() {
        return Ok(Region::whole(shape));
    }
    let region = held.region(shape, &step.mesh()?, step.rank());
    Ok(region.map_err(burn_fsdp_checkpoint::Error::from)?)
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
