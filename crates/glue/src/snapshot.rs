//! Snapshots: the state of the eager engine and the optimizer, as tensors of [steps](burn_fsdp_checkpoint).
//!
//! Parameters and their optimizer state are named by path, so a step loads into any number of ranks, any mesh and any
//! shard layout.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use burn_fsdp_checkpoint::{Layout, Region, Snapshot, TensorKind, TensorSpec, WritePlan};
use burn_fsdp_collectives::Source;
use burn_fsdp_mesh::{Mesh, Partition};
use burn_fsdp_shard::{LocalPart, LocalTensor, check_elementwise_once, local_ids, local_state};
use burn_pack::Tensor as PackedTensor;
use serde_json::Value;

use crate::dtype::dtype_of;
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{Kept, OptimizerParts, check_taken, state_name};
use crate::optimizer_state::{Holders, StateTensor, add_empty, not_elementwise, states};
use crate::piecewise::taken_in_pieces;
use crate::tied;

/// The metadata key for the scale of an adapter, by which the product of its factors is multiplied.
pub(crate) const ADAPTER_SCALE: &str = "adapter_scale";

/// One rank's part of the state of a training run at one moment.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrainingSnapshot {
    /// The parts that each rank writes; the same plan on every rank.
    pub plan: Arc<WritePlan>,
    /// The bytes of this rank's tensors. On the CPU backend, the model's bytes are shared, not copied. Training may
    /// continue.
    pub snapshot: Snapshot,
    /// The non-tensor values of the optimizer's state, for
    /// [`TrainingState::optimizer`](burn_fsdp_checkpoint::TrainingState::optimizer).
    pub optimizer: Value,
}

/// Takes a snapshot of a sharded model and its optimizer. `mesh` contains all ranks that save, and `axis` is the axis
/// over which the model is sharded. The save fails on a mesh or an axis by which a rank would write elements that it
/// does not hold.
///
/// All ranks must take their snapshots at the same point. If the policy assigns parameters to [one
/// owner](burn_fsdp_shard::ShardPolicy::one_owner), the owners send the other ranks their optimizer state without its
/// elements; otherwise nothing is communicated. Running states and other values that differ between ranks (integers,
/// ignored parameters) are saved from rank 0. To save the mean of running states, call
/// [`sync_buffers`](burn_fsdp_shard::sync_buffers) first.
///
/// The first call also checks whether `optimizer` may work on shards, as
/// [`check_elementwise`](burn_fsdp_shard::check_elementwise) does.
///
/// # Errors
///
/// An optimizer that computes with whole tensors; a tensor whose type checkpoints do not support; an optimizer with
/// state of parameters that are not sharded, which differs between ranks; state whose type would change when Burn
/// reassembles it ([`CheckpointError::StateType`]), because the training run could not be resumed.
pub fn snapshot<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    mesh: &Mesh,
    axis: &str,
) -> Result<TrainingSnapshot, CheckpointError> {
    snapshot_matching(model, optimizer, mesh, axis, |_| true)
}

/// Takes a snapshot of the tensors of a sharded model that `is_wanted` selects by path, and of the optimizer's state
/// for them, for example of adapters without the frozen weights.
/// [`restore_training`](crate::restore::restore_training) restores it.
///
/// `is_wanted` must select the same paths on all ranks. Otherwise like [`snapshot`].
///
/// # Errors
///
/// As [`snapshot`].
pub fn snapshot_matching<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    mesh: &Mesh,
    axis: &str,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<TrainingSnapshot, CheckpointError> {
    check_elementwise_once(model, optimizer)?;
    let numbers = local_ids(model)?.into_iter().map(|id| id.id.val());
    let numbers: Vec<u64> = numbers.collect();
    let parts = taken_in_pieces(optimizer, &numbers)?;
    let held = States {
        parts,
        are_in: Store::Memory,
    };
    of_states(model, optimizer, &held, (mesh, axis), is_wanted)
}

/// The states of an optimizer, split by parameter.
pub(crate) struct States {
    pub(crate) parts: OptimizerParts,
    pub(crate) are_in: Store,
}

/// Storage of the states' elements until they are written to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Memory,
    /// Files, which are read when a step is written. A shard without elements has no state.
    Files,
}

/// Takes a snapshot of a model and of the states of its optimizer.
pub(crate) fn of_states<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    held: &States,
    (mesh, axis): (&Mesh, &str),
    is_wanted: impl Fn(&str) -> bool,
) -> Result<TrainingSnapshot, CheckpointError> {
    let parts = &held.parts;
    let ids = local_ids(model)?;
    let locals = local_state(model)?;
    let order: Vec<_> = locals.iter().map(|local| local.path.clone()).collect();
    let locals: BTreeMap<_, _> = locals
        .into_iter()
        .map(|local| (local.path.clone(), local))
        .collect();
    let mut states = states(model, parts, &ids, &locals)?;
    if held.are_in == Store::Files {
        add_empty(model, &mut states, &locals)?;
    }
    // After the collective work of all ranks, because only an owner has the state of its parameters and may fail here.
    check_taken(optimizer, parts)?;
    let mut taken = Tensors {
        place: Ranks { mesh, axis },
        are_in: held.are_in,
        specs: Vec::new(),
        regions: Vec::new(),
        snapshot: Snapshot::new(),
    };
    for path in order.iter().filter(|path| is_wanted(path)) {
        taken.add_parameter(&locals[path])?;
    }
    let mut kept: BTreeMap<String, Kept> = BTreeMap::new();
    for id in ids.into_iter().filter(|id| is_wanted(&id.path)) {
        let state = states.remove(&id.path).unwrap_or_default();
        let local = &locals[&id.path];
        for tensor in &state.tensors {
            let own = parts.tensor(id.id.val(), &tensor.field);
            taken.add_state(local, tensor, own)?;
        }
        kept.insert(id.path, state.kept);
    }
    let Tensors {
        specs,
        regions,
        snapshot,
        ..
    } = taken;
    Ok(TrainingSnapshot {
        plan: Arc::new(WritePlan::of_regions(mesh, specs, regions)?),
        snapshot,
        optimizer: serde_json::to_value(kept).map_err(optimizer_error)?,
    })
}

/// Wraps a buffer of elements, which the checkpoint's snapshot reads as bytes.
#[derive(Debug)]
pub struct Elements<T>(pub T);

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

/// Returns the region of a tensor that this rank holds.
pub(crate) fn region_of(tensor: &LocalTensor) -> Region {
    Region::Flat(tensor.range())
}

/// Collects a snapshot: the description of all ranks' tensors, and this rank's elements.
struct Tensors<'a> {
    place: Ranks<'a>,
    are_in: Store,
    specs: Vec<TensorSpec>,
    /// The regions by tensor and rank.
    regions: Vec<Vec<Region>>,
    snapshot: Snapshot,
}

impl Tensors<'_> {
    fn add_parameter(&mut self, local: &LocalTensor) -> Result<(), CheckpointError> {
        let kind = match local.part {
            LocalPart::Own => TensorKind::Buffer,
            _ => TensorKind::Parameter,
        };
        let dtype = dtype_of(&local.path, local.dtype)?;
        let layout = self.place.layout_of(local)?;
        let mut spec = TensorSpec::new(&local.path, local.shape.clone(), dtype, kind, layout);
        spec = tied::with_paths(spec, &local.tied);
        if let Some(scale) = local.adapter_scale {
            spec = spec.with(ADAPTER_SCALE, scale);
        }
        self.add(spec, Holders::of(local))?;
        self.snapshot.insert(
            &local.path,
            region_of(local),
            Elements(local.elements.clone()),
        );
        Ok(())
    }

    /// Adds a tensor of the optimizer state of parameter `local`; `own` is this rank's part.
    fn add_state(
        &mut self,
        local: &LocalTensor,
        tensor: &StateTensor,
        own: Option<&PackedTensor>,
    ) -> Result<(), CheckpointError> {
        let name = state_name(&local.path, &tensor.field);
        let holders = Holders::of(local);
        let elements = local.elements.len() / local.dtype.size();
        if holders == Holders::Parts && tensor.num_elements() != elements {
            return Err(not_elementwise(&name, &tensor.shape, elements));
        }
        let shape = match holders {
            Holders::Parts => local.shape.clone(),
            Holders::All | Holders::Owner(_) => tensor.shape.clone(),
        };
        let held = match holders {
            Holders::Parts => region_of(local),
            Holders::All | Holders::Owner(_) => Region::whole(&shape),
        };
        let kind = TensorKind::OptimizerState;
        let spec = TensorSpec::new(
            &name,
            shape,
            tensor.dtype,
            kind,
            self.place.layout_of(local)?,
        );
        let spec = spec.with("path", local.path.clone());
        self.add(spec.with("field", tensor.field.clone()), holders)?;
        if let Some(own) = own {
            match self.are_in {
                Store::Memory => {
                    let bytes = own.to_bytes().map_err(optimizer_error)?;
                    self.snapshot.insert(name, held, Elements(bytes));
                }
                Store::Files => {
                    let (own, len) = (own.clone(), own.byte_len());
                    let read = move || Ok(own.to_bytes()?.to_vec());
                    self.snapshot.insert_read(name, held, len, read);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, spec: TensorSpec, holders: Holders) -> Result<(), CheckpointError> {
        let ranks = 0..self.place.mesh.size();
        let regions = ranks.map(|rank| self.place.region(&spec, holders, rank));
        self.regions.push(regions.collect::<Result<_, _>>()?);
        self.specs.push(spec);
        Ok(())
    }
}

/// The ranks that save, and the axis of the shards.
struct Ranks<'a> {
    mesh: &'a Mesh,
    axis: &'a str,
}

impl Ranks<'_> {
    /// Returns the elements of a tensor that `rank` holds.
    fn region(
        &self,
        spec: &TensorSpec,
        holders: Holders,
        rank: usize,
    ) -> Result<Region, CheckpointError> {
        let is_holder = match (spec.kind, holders) {
            // The ranks' values differ: a step has rank 0's, and never a mixture.
            (TensorKind::Buffer, _) => rank == 0,
            (_, Holders::Owner(owner)) => self.mesh.index_on(self.axis, rank)? == owner,
            (_, Holders::Parts | Holders::All) => {
                return Ok(spec.layout.region(&spec.shape, self.mesh, rank)?);
            }
        };
        Ok(if is_holder {
            Region::whole(&spec.shape)
        } else {
            Region::Flat(0..0)
        })
    }

    /// Returns the layout of a parameter, and of its state, in the snapshot. A tensor with one owner has one part.
    fn layout_of(&self, local: &LocalTensor) -> Result<Layout, CheckpointError> {
        let LocalPart::Shard { partition, .. } = &local.part else {
            return Ok(Layout::replicated(self.mesh));
        };
        let (ranks, got) = (partition.num_shards(), self.mesh.axis(self.axis)?.size);
        if ranks != got {
            return Err(CheckpointError::OtherMesh {
                path: local.path.clone(),
                ranks,
                axis: self.axis.to_owned(),
                got,
            });
        }
        if partition.multiple() > 1 {
            let multiple = partition.multiple();
            return Ok(Layout::multiples(self.mesh, self.axis, multiple)?);
        }
        let flat = Partition::flat(partition.num_elements(), partition.num_shards());
        let is_flat = partition.sole_owner().is_some() || flat.as_ref() == Ok(partition);
        Ok(if is_flat {
            Layout::flat(self.mesh, self.axis)?
        } else {
            Layout::dim(self.mesh, self.axis, 0)?
        })
    }
}
