//! Snapshots: what the eager engine and the optimizer hold, as tensors of [steps](crate::checkpoint).
//!
//! Parameters and their optimizer state are named by path, so that a step loads into any number of
//! ranks, any mesh and either layout.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use burn_fsdp_checkpoint::{Layout, Region, Snapshot, TensorKind, TensorSpec, WritePlan};
use burn_fsdp_collectives::Source;
use burn_fsdp_mesh::{Mesh, Partition};
use burn_fsdp_shard::{LocalPart, LocalTensor, check_elementwise_once, local_ids, local_state};
use serde_json::Value;

use crate::dtype::dtype_of;
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, OptimizerParts, state_name};

/// The part of one rank in the state of a training at one moment.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrainingSnapshot {
    /// The plan of who writes what; the same on every rank.
    pub plan: Arc<WritePlan>,
    /// The bytes. Those of the model are shared, not copied: training may go on.
    pub snapshot: Snapshot,
    /// The values that the optimizer keeps beside tensors, for
    /// [`TrainingState::optimizer`](burn_fsdp_checkpoint::TrainingState::optimizer).
    pub optimizer: Value,
}

/// Takes a snapshot of a sharded model and its optimizer. `mesh` is that of all ranks that save,
/// `axis` the one over which the model is sharded.
///
/// Not collective, but all ranks must take theirs at the same point. Running states, and whatever else
/// each rank has of its own (integers, ignored parameters), are stored once: rank 0's. Call
/// [`sync_buffers`](crate::state::sync_buffers) before, if running states are to be the mean.
///
/// The first time it also tries whether `optimizer` may work on shards, as
/// [`check_elementwise`](crate::optim::check_elementwise) does.
///
/// # Errors
///
/// An optimizer that computes with whole tensors; a tensor of another type than checkpoints hold; an optimizer with
/// state of parameters that are not sharded, which is each rank's own.
pub fn snapshot<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    mesh: &Mesh,
    axis: &str,
) -> Result<TrainingSnapshot, CheckpointError> {
    check_elementwise_once(model, optimizer)?;
    let mut specs = Vec::new();
    let mut regions = Vec::new();
    let mut snapshot = Snapshot::new();
    let mut held = HashMap::new();
    let of_ranks = |spec: &TensorSpec| -> Result<Vec<Region>, CheckpointError> {
        let of_rank = |rank| match spec.kind {
            // The ranks' differ: a step has those of rank 0, and never some of one and some of another.
            TensorKind::Buffer if rank > 0 => Ok(Region::Flat(0..0)),
            _ => Ok(spec.layout.region(&spec.shape, mesh, rank)?),
        };
        (0..mesh.size()).map(of_rank).collect()
    };
    for tensor in local_state(model)? {
        let layout = layout_of(&tensor, mesh, axis)?;
        let kind = match tensor.part {
            LocalPart::Own => TensorKind::Buffer,
            _ => TensorKind::Parameter,
        };
        let dtype = dtype_of(&tensor.path, tensor.dtype)?;
        let spec = TensorSpec::new(&tensor.path, tensor.shape.clone(), dtype, kind, layout);
        regions.push(of_ranks(&spec)?);
        specs.push(spec.clone());
        snapshot.insert(&tensor.path, Elements(tensor.elements.clone()));
        let elements = tensor.elements.len() / tensor.dtype.size();
        held.insert(tensor.path, (spec, elements));
    }
    let state = OptimizerParts::take(optimizer)?;
    let mut kept: BTreeMap<String, Kept> = BTreeMap::new();
    let mut taken = 0;
    for local in local_ids(model)? {
        let id = local.id.val();
        let (spec, elements) = &held[&local.path];
        let of_parameter = kept.entry(local.path.clone()).or_default();
        of_parameter.group_path = state.paths.get(&id.to_string()).cloned();
        let scalars = state.scalars_of(id);
        of_parameter.scalars = scalars
            .map(|(field, scalar)| (field, scalar.into()))
            .collect();
        let mut tensors: Vec<_> = state.tensors_of(id).collect();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        taken += tensors.len();
        for (field, tensor) in tensors {
            let name = state_name(&local.path, &field);
            if tensor.shape.num_elements() != *elements {
                return Err(optimizer_error(format!(
                    "`{name}` has {} elements, the parameter {elements} on this rank; only \
                     element-wise state can be resharded",
                    tensor.shape.num_elements()
                )));
            }
            let dtype = dtype_of(&name, tensor.dtype)?;
            let kind = TensorKind::OptimizerState;
            let spec = TensorSpec::new(&name, spec.shape.clone(), dtype, kind, spec.layout.clone());
            regions.push(of_ranks(&spec)?);
            specs.push(spec.with("path", local.path.clone()).with("field", field));
            let bytes = tensor.to_bytes().map_err(optimizer_error)?;
            snapshot.insert(name, Elements(bytes));
        }
    }
    if taken != state.tensors.len() {
        return Err(optimizer_error(format!(
            "{} tensors belong to parameters that are not sharded, and are each rank's own",
            state.tensors.len() - taken
        )));
    }
    Ok(TrainingSnapshot {
        plan: Arc::new(WritePlan::of_regions(mesh, specs, regions)?),
        snapshot,
        optimizer: serde_json::to_value(kept).map_err(optimizer_error)?,
    })
}

/// Bytes of whatever owner, for the checkpoint's snapshot.
pub(crate) struct Elements<T>(pub(crate) T);

impl AsRef<[u8]> for Elements<Source> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl AsRef<[u8]> for Elements<Bytes> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Elements<TensorData> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

fn layout_of(tensor: &LocalTensor, mesh: &Mesh, axis: &str) -> Result<Layout, CheckpointError> {
    let LocalPart::Shard { partition, .. } = &tensor.part else {
        return Ok(Layout::replicated(mesh));
    };
    let flat = Partition::flat(partition.num_elements(), partition.num_shards());
    Ok(match flat.as_ref() == Ok(partition) {
        true => Layout::flat(mesh, axis)?,
        false => Layout::dim(mesh, axis, 0)?,
    })
}
