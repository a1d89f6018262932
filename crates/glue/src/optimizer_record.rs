//! The state of an optimizer: Burn's record of it, split by parameter and joined again.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, Shape};
use burn_fsdp_checkpoint::{Step, TensorEntry};
use burn_fsdp_shard::is_probe;
use burn_pack::{Error as PackError, Reader, Scalar, Tensor as PackedTensor, Writer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{CheckpointError, optimizer_error};

/// The name under which Burn's optimizers store the number of dims of each parameter's tensor. In the eager engine it
/// counts the dims that the optimizer sees; a compiled step does not need it.
pub const RANK_KEY: &str = "__rank";

/// Returns an optimizer with the same configuration, without state.
pub fn emptied(optimizer: &ModuleOptimizer) -> ModuleOptimizer {
    optimizer.clone().load_record(OptimizerRecord::default())
}

/// Returns the name of a piece of optimizer state.
pub fn state_name(path: &str, field: &str) -> String {
    format!("optimizer.{path}.{field}")
}

/// Returns the parameter and the field that a saved piece of optimizer state belongs to.
pub(crate) fn owner_of(entry: &TensorEntry) -> Result<(&str, &str), CheckpointError> {
    let text = |key: &str| entry.metadata.get(key).and_then(Value::as_str);
    let owner = text("path").zip(text("field"));
    owner.ok_or_else(|| optimizer_error(format!("`{}` names no parameter", entry.name)))
}

/// Returns the non-tensor values in the optimizer state of a saved step, by parameter path.
pub(crate) fn kept_in(step: &Step) -> Result<BTreeMap<String, Kept>, CheckpointError> {
    match &step.index().training.optimizer {
        Value::Null => Ok(BTreeMap::new()),
        kept => BTreeMap::deserialize(kept).map_err(optimizer_error),
    }
}

/// The non-tensor values that an optimizer keeps for one parameter.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// The numbers by field.
    pub scalars: BTreeMap<String, Number>,
    /// The path by which the optimizer finds the parameter's group.
    pub group_path: Option<String>,
}

/// A number in an optimizer's records, of any numeric type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Number {
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A float.
    Float(f64),
    /// A boolean.
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

/// An optimizer's record, split into its parts.
#[derive(Debug, Default)]
pub struct OptimizerParts {
    /// The numbers, by the parameter's id and the field.
    pub scalars: BTreeMap<String, Scalar>,
    /// The paths by which groups find parameters, by the parameter's id.
    pub paths: BTreeMap<String, String>,
    /// The tensors, named by the parameter's id and the field.
    pub tensors: Vec<PackedTensor>,
}

impl OptimizerParts {
    /// Splits an optimizer's record.
    ///
    /// # Errors
    ///
    /// A record that cannot be read.
    pub fn take(optimizer: &ModuleOptimizer) -> Result<Self, CheckpointError> {
        let bytes = optimizer.into_bytes().map_err(optimizer_error)?;
        Self::of(Reader::from_bytes(bytes).map_err(optimizer_error)?)
    }

    /// Splits a record into its parts.
    ///
    /// # Errors
    ///
    /// Same as [`take`](Self::take).
    pub fn of(reader: Reader) -> Result<Self, CheckpointError> {
        let mut parts = Self {
            scalars: reader.scalars().clone(),
            paths: reader.metadata().clone(),
            tensors: reader.into_tensors().map_err(optimizer_error)?,
        };
        parts.scalars.retain(|name, _| !is_of_probe(name));
        parts.paths.retain(|name, _| !is_of_probe(name));
        parts.tensors.retain(|tensor| !is_of_probe(&tensor.name));
        Ok(parts)
    }

    /// Adds the parts of other parameters.
    pub(crate) fn extend(&mut self, others: Self) {
        self.scalars.extend(others.scalars);
        self.paths.extend(others.paths);
        self.tensors.extend(others.tensors);
    }

    /// Returns the tensor that is kept under `field` of the parameter `id`, if there is one.
    pub fn tensor(&self, id: u64, field: &str) -> Option<&PackedTensor> {
        let name = format!("{id}.{field}");
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the numbers of the parameter `id`, by field.
    pub fn scalars_of(&self, id: u64) -> impl Iterator<Item = (String, Scalar)> {
        let prefix = format!("{id}.");
        self.scalars.iter().filter_map(move |(name, scalar)| {
            let field = name.strip_prefix(&prefix)?;
            Some((field.to_owned(), *scalar))
        })
    }

    /// Returns the tensors of the parameter `id`, by field.
    pub fn tensors_of(&self, id: u64) -> impl Iterator<Item = (String, &PackedTensor)> {
        let prefix = format!("{id}.");
        self.tensors.iter().filter_map(move |tensor| {
            let field = tensor.name.strip_prefix(&prefix)?;
            Some((field.to_owned(), tensor))
        })
    }
}

/// Returns a tensor like `tensor`, whose bytes `read` provides on demand.
pub(crate) fn deferred(
    tensor: &PackedTensor,
    read: impl Fn() -> Result<Bytes, PackError> + Send + Sync + 'static,
) -> PackedTensor {
    PackedTensor::deferred(
        tensor.name.clone(),
        tensor.dtype,
        tensor.shape.clone(),
        tensor.param_id,
        tensor.byte_len(),
        read,
    )
}

/// Returns the bytes of an optimizer's record: its tensors and numbers by name, and the paths of parameters by id.
pub fn packed(
    tensors: Vec<PackedTensor>,
    scalars: BTreeMap<String, Scalar>,
    paths: &BTreeMap<String, String>,
) -> Result<Bytes, CheckpointError> {
    let mut writer = Writer::new(tensors);
    for (name, scalar) in scalars {
        writer = writer.with_scalar(&name, scalar);
    }
    for (id, path) in paths {
        writer = writer.with_metadata(id, path);
    }
    writer.into_bytes().map_err(optimizer_error)
}

/// Loads a record's state into an optimizer, and requires that it accepts all of it.
pub(crate) fn with_state(
    optimizer: ModuleOptimizer,
    record: Bytes,
) -> Result<ModuleOptimizer, CheckpointError> {
    let reader = Reader::from_bytes(record.clone()).map_err(optimizer_error)?;
    check_taken(&optimizer, &OptimizerParts::of(reader)?)?;
    let record = OptimizerRecord::from_bytes(record).map_err(optimizer_error)?;
    Ok(optimizer.load_record(record))
}

/// Loads the state of a record file into an optimizer, and requires that it accepts all of it. On the CPU backend,
/// tensors are read on demand, so the file must exist until all are read.
pub fn with_state_of_file(
    optimizer: ModuleOptimizer,
    path: &std::path::Path,
) -> Result<ModuleOptimizer, CheckpointError> {
    let reader = Reader::from_file_exact(path).map_err(optimizer_error)?;
    check_taken(&optimizer, &OptimizerParts::of(reader)?)?;
    let record = OptimizerRecord::load(path).map_err(optimizer_error)?;
    Ok(optimizer.load_record(record))
}

/// Rejects a record unless the optimizer accepts all of it in the same types. Burn drops states that it cannot
/// reassemble, and training would continue without them. Burn also creates tensors in the default type of the device,
/// so the next step of a parameter of a different type panics. The check uses tensors of one element.
pub(crate) fn check_taken(
    optimizer: &ModuleOptimizer,
    parts: &OptimizerParts,
) -> Result<(), CheckpointError> {
    let (scalars, paths) = (parts.scalars.clone(), parts.paths.clone());
    let mut names: BTreeSet<String> = scalars.keys().cloned().collect();
    let mut tensors = Vec::new();
    for tensor in &parts.tensors {
        let one = Bytes::from_bytes_vec(vec![0; tensor.dtype.size()]);
        names.insert(tensor.name.clone());
        let shape = Shape::from(vec![1; tensor.shape.num_dims()]);
        let (name, id) = (tensor.name.clone(), tensor.param_id);
        tensors.push(PackedTensor::new(name, tensor.dtype, shape, id, one));
    }
    let small = OptimizerRecord::from_bytes(packed(tensors, scalars, &paths)?);
    let small = small.map_err(optimizer_error)?;
    let taken = OptimizerParts::take(&optimizer.clone().load_record(small))?;
    let types: BTreeMap<_, _> = taken
        .tensors
        .iter()
        .map(|it| (&it.name, it.dtype))
        .collect();
    let is_other = |tensor: &&PackedTensor| {
        let taken = types.get(&tensor.name);
        taken.is_some_and(|taken| *taken != tensor.dtype)
    };
    if let Some(tensor) = parts.tensors.iter().find(is_other) {
        let id = tensor.name.split_once('.').map_or("", |(id, _)| id);
        return Err(CheckpointError::StateType {
            path: paths.get(id).cloned().unwrap_or_default(),
            field: field_of(&tensor.name).to_owned(),
            dtype: tensor.dtype,
            back: types[&tensor.name],
        });
    }
    let tensors = taken.tensors.iter().map(|tensor| tensor.name.clone());
    let taken: BTreeSet<String> = taken.scalars.into_keys().chain(tensors).collect();
    let differing: Vec<_> = names.symmetric_difference(&taken).collect();
    // Every optimizer stores the number of dims, so a difference in another field is more helpful in the message.
    let telling = differing.iter().find(|name| field_of(name) != RANK_KEY);
    match telling.or(differing.first()) {
        None => Ok(()),
        Some(name) => {
            let fields: BTreeSet<&str> = names.iter().map(|name| field_of(name)).collect();
            Err(optimizer_error(format!(
                "the step has {fields:?}, but the optimizer {} `{}`; configure the optimizer like the one that was \
                 saved",
                if names.contains(*name) {
                    "does not accept the state with"
                } else {
                    "needs"
                },
                field_of(name)
            )))
        }
    }
}

/// Returns true if a name begins with the id of a probe, on which the optimizer was tried, instead of a parameter's.
fn is_of_probe(name: &str) -> bool {
    let id = name.split_once('.').map_or(name, |(id, _)| id);
    id.parse::<u64>()
        .is_ok_and(|id| is_probe(ParamId::from(id)))
}

/// Removes the parameter id at the start of a name.
pub(crate) fn field_of(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, field)| field)
}
