//! Checkpoints of a sharded training: what the engine and the optimizer hold, as tensors of
//! [`steps`](crate::steps), and back.
//!
//! Parameters and their optimizer state are named by path, so that a step loads into any number of
//! ranks, any mesh and either layout.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{BoolStore, Bytes, DType, Shape};
use burn_fsdp_checkpoint::{
    Dtype, Error as StepError, ExpectedTensor, Extra, Layout, Region, Snapshot, Step, TensorEntry,
    TensorKind, TensorSpec, WritePlan,
};
use burn_fsdp_mesh::{Mesh, Partition};
use burn_fsdp_shard::{
    LocalPart, LocalTensor, check_elementwise_once, load_local_state, local_ids, local_state,
};
use burn_pack::{Reader, Scalar, Tensor as PackedTensor, Writer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error as ThisError;

/// Why a training could not be saved or restored.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The step cannot be written or read, or does not fit the model.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The model cannot be read or filled.
    #[error(transparent)]
    Engine(#[from] burn_fsdp_shard::Error),
    /// The compiled step cannot be read or filled.
    #[error(transparent)]
    Compiled(Box<burn_fsdp_spmd::Error>),
    /// The state of the optimizer cannot be taken apart or put together.
    #[error("state of the optimizer: {reason}")]
    Optimizer {
        /// What is wrong.
        reason: String,
    },
    /// Another rank failed; this one has changed nothing on disk.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// A tensor is of a type that checkpoints do not hold.
    #[error("`{name}` is of type {dtype:?}; checkpoints hold floats, integers and booleans")]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
    },
}

impl From<burn_fsdp_spmd::Error> for CheckpointError {
    fn from(error: burn_fsdp_spmd::Error) -> Self {
        Self::Compiled(Box::new(error))
    }
}

pub(crate) fn optimizer_error(reason: impl ToString) -> CheckpointError {
    CheckpointError::Optimizer {
        reason: reason.to_string(),
    }
}

/// One rank's part of a training at one moment.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrainingSnapshot {
    /// Who writes what; the same on every rank.
    pub plan: Arc<WritePlan>,
    /// The bytes. Those of the model are shared, not copied: training may go on.
    pub snapshot: Snapshot,
    /// What the optimizer keeps beside tensors, for
    /// [`TrainingState::optimizer`](burn_fsdp_checkpoint::TrainingState::optimizer).
    pub optimizer: Value,
}

/// Name of a piece of optimizer state.
pub(crate) fn state_name(path: &str, field: &str) -> String {
    format!("optimizer.{path}.{field}")
}

/// What an optimizer keeps for one parameter beside tensors.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// By field.
    pub(crate) scalars: BTreeMap<String, Number>,
    /// The path by which the optimizer finds the parameter's group.
    pub(crate) group_path: Option<String>,
}

/// A number of any kind that the optimizer's records have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Number {
    Int(i64),
    UInt(u64),
    Float(f64),
    Bool(bool),
}

impl From<Scalar> for Number {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Int(value) => Self::Int(value),
            Scalar::UInt(value) => Self::UInt(value),
            Scalar::Float(value) => Self::Float(value),
            Scalar::Bool(value) => Self::Bool(value),
        }
    }
}

impl From<Number> for Scalar {
    fn from(number: Number) -> Self {
        match number {
            Number::Int(value) => Self::Int(value),
            Number::UInt(value) => Self::UInt(value),
            Number::Float(value) => Self::Float(value),
            Number::Bool(value) => Self::Bool(value),
        }
    }
}

/// Takes a snapshot of a sharded model and its optimizer. `mesh` is that of all ranks that save,
/// `axis` the one over which the model is sharded.
///
/// Not collective, but all ranks must take theirs at the same point. Running states, and whatever else
/// each rank has of its own (integers, ignored parameters), are stored once: rank 0's. Call
/// [`sync_buffers`](crate::sync_buffers) before, if running states are to be the mean.
///
/// The first time it also tries whether `optimizer` may work on shards, as
/// [`check_elementwise`](crate::check_elementwise) does.
///
/// # Errors
///
/// An optimizer that computes with whole tensors; a tensor of another type than checkpoints hold; an optimizer with state of parameters that are not
/// sharded, which is each rank's own.
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
struct Elements<T>(T);

impl AsRef<[u8]> for Elements<burn_fsdp_collectives::Source> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl AsRef<[u8]> for Elements<Bytes> {
    fn as_ref(&self) -> &[u8] {
        &self.0
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

pub(crate) fn dtype_of(name: &str, dtype: DType) -> Result<Dtype, CheckpointError> {
    match dtype {
        DType::F64 => Ok(Dtype::F64),
        DType::F32 | DType::Flex32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        DType::I64 => Ok(Dtype::I64),
        DType::I32 => Ok(Dtype::I32),
        DType::I16 => Ok(Dtype::I16),
        DType::I8 => Ok(Dtype::I8),
        DType::U64 => Ok(Dtype::U64),
        DType::U32 | DType::Bool(BoolStore::U32) => Ok(Dtype::U32),
        DType::U16 => Ok(Dtype::U16),
        DType::U8 => Ok(Dtype::U8),
        DType::Bool(BoolStore::Native | BoolStore::U8) => Ok(Dtype::BOOL),
        dtype => Err(CheckpointError::Type {
            name: name.to_owned(),
            dtype,
        }),
    }
}

/// An optimizer's record, taken apart.
struct OptimizerParts {
    scalars: BTreeMap<String, Scalar>,
    paths: BTreeMap<String, String>,
    tensors: Vec<PackedTensor>,
}

impl OptimizerParts {
    fn take(optimizer: &ModuleOptimizer) -> Result<Self, CheckpointError> {
        let bytes = optimizer.into_bytes().map_err(optimizer_error)?;
        let reader = Reader::from_bytes(bytes).map_err(optimizer_error)?;
        Ok(Self {
            scalars: reader.scalars().clone(),
            paths: reader.metadata().clone(),
            tensors: reader.into_tensors().map_err(optimizer_error)?,
        })
    }

    fn scalars_of(&self, id: u64) -> impl Iterator<Item = (String, Scalar)> {
        let prefix = format!("{id}.");
        self.scalars.iter().filter_map(move |(name, scalar)| {
            let field = name.strip_prefix(&prefix)?;
            Some((field.to_owned(), *scalar))
        })
    }

    fn tensors_of(&self, id: u64) -> impl Iterator<Item = (String, &PackedTensor)> {
        let prefix = format!("{id}.");
        self.tensors.iter().filter_map(move |tensor| {
            let field = tensor.name.strip_prefix(&prefix)?;
            Some((field.to_owned(), tensor))
        })
    }
}

/// Gives a sharded model, and the optimizer that trains it, the state of `step`, whatever the ranks
/// were that saved it. Each rank reads the bytes that it needs.
///
/// Not collective: ranks that meet an error and go on with what they had must see to it that all do.
/// `optimizer` is configured as the one that was saved; its state is replaced. It is tried as by
/// [`snapshot`].
///
/// # Errors
///
/// An optimizer that computes with whole tensors. Tensors of the model that the step lacks or has in another shape, tensors of the step that the
/// model lacks, damage: nothing is changed then, in no copy of the model.
pub fn restore<M: Module>(
    model: M,
    optimizer: ModuleOptimizer,
    step: &Step,
) -> Result<(M, ModuleOptimizer), CheckpointError> {
    check_elementwise_once(&model, &optimizer)?;
    let state = local_state(&model)?;
    let optimizer = restore_optimizer(&model, &state, optimizer, step)?;
    Ok((restore_model(model, step)?, optimizer))
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
    load_local_state(model, |tensor| match is_wanted(&tensor.path) {
        true => Ok(Some(step.read(&tensor.path, &region_of(tensor))?)),
        false => Ok(None),
    })
}

pub(crate) fn region_of(tensor: &LocalTensor) -> Region {
    match &tensor.part {
        LocalPart::Shard { range, .. } => Region::Flat(range.clone()),
        LocalPart::Whole | LocalPart::Own => Region::Flat(0..tensor.shape.iter().product()),
    }
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
    let entries = step.index().tensors.iter();
    for entry in entries.filter(|entry| entry.kind == TensorKind::OptimizerState) {
        let text = |key: &str| entry.metadata.get(key).and_then(Value::as_str);
        let (Some(path), Some(field)) = (text("path"), text("field")) else {
            return Err(optimizer_error(format!(
                "`{}` names no parameter",
                entry.name
            )));
        };
        let found = ids.get(path).zip(held.get(&path.to_owned()));
        let Some((id, local)) = found.filter(|(_, local)| local.shape == entry.shape) else {
            return Err(optimizer_error(format!(
                "`{}` of shape {:?} belongs to `{path}`, which the model has not, or in another shape",
                entry.name, entry.shape
            )));
        };
        let region = region_of(local);
        let bytes = Bytes::from_bytes_vec(step.read(&entry.name, &region)?);
        let dtype = burn_dtype(&entry.name, entry.dtype)?;
        let shape = Shape::from([region.len()]);
        let name = format!("{id}.{field}");
        tensors.push(PackedTensor::new(name, dtype, shape, Some(*id), bytes));
    }
    let kept = match &step.index().training.optimizer {
        Value::Null => BTreeMap::new(),
        kept => BTreeMap::<String, Kept>::deserialize(kept).map_err(optimizer_error)?,
    };
    let mut writer = Writer::new(tensors);
    for (path, kept) in kept {
        let Some(id) = ids.get(&path) else {
            let reason = format!("the step has state of `{path}`, which the model has not");
            return Err(optimizer_error(reason));
        };
        for (field, number) in kept.scalars {
            writer = writer.with_scalar(&format!("{id}.{field}"), number.into());
        }
        if let Some(group) = kept.group_path {
            writer = writer.with_metadata(&id.to_string(), &group);
        }
    }
    let bytes = writer.into_bytes().map_err(optimizer_error)?;
    check_taken(&optimizer, &bytes)?;
    let record = OptimizerRecord::from_bytes(bytes).map_err(optimizer_error)?;
    Ok(optimizer.load_record(record))
}

/// Refuses a record of which the optimizer does not take everything: Burn leaves out the states that it cannot
/// put together, and training would go on without them. Tried with tensors of one element.
fn check_taken(optimizer: &ModuleOptimizer, record: &Bytes) -> Result<(), CheckpointError> {
    let reader = Reader::from_bytes(record.clone()).map_err(optimizer_error)?;
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    let mut names: BTreeSet<String> = scalars.keys().cloned().collect();
    let mut tensors = Vec::new();
    for tensor in reader.into_tensors().map_err(optimizer_error)? {
        let one = Bytes::from_bytes_vec(vec![0; tensor.dtype.size()]);
        names.insert(tensor.name.clone());
        let shape = Shape::from([1]);
        let id = tensor.param_id;
        tensors.push(PackedTensor::new(tensor.name, tensor.dtype, shape, id, one));
    }
    let mut writer = Writer::new(tensors);
    for (name, scalar) in scalars {
        writer = writer.with_scalar(&name, scalar);
    }
    for (name, path) in paths {
        writer = writer.with_metadata(&name, &path);
    }
    let bytes = writer.into_bytes().map_err(optimizer_error)?;
    let small = OptimizerRecord::from_bytes(bytes).map_err(optimizer_error)?;
    let taken = OptimizerParts::take(&optimizer.clone().load_record(small))?;
    let tensors = taken.tensors.iter().map(|tensor| tensor.name.clone());
    let taken: BTreeSet<String> = taken.scalars.into_keys().chain(tensors).collect();
    match names.symmetric_difference(&taken).next() {
        None => Ok(()),
        Some(name) => {
            let fields: BTreeSet<&str> = names.iter().map(|name| field_of(name)).collect();
            Err(optimizer_error(format!(
                "the step has {fields:?}, and the optimizer {} `{}`; configure the optimizer as the \
                 one that was saved",
                match names.contains(name) {
                    true => "does not take the state with",
                    false => "needs",
                },
                field_of(name)
            )))
        }
    }
}

/// A name without the id of the parameter that it begins with.
fn field_of(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, field)| field)
}

pub(crate) fn burn_dtype(name: &str, dtype: Dtype) -> Result<DType, CheckpointError> {
    match dtype {
        Dtype::F64 => Ok(DType::F64),
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        other => Err(optimizer_error(format!("`{name}` is of type {other}"))),
    }
}
