//! The description of a tensor in a checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Dtype, Layout};
use burn_fsdp_mesh::num_elements;

/// Maximum number of dims of a tensor.
pub(crate) const MAX_DIMS: usize = 16;

/// Maximum size of a tensor's name in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 4096;

/// The purpose of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// A trained or frozen parameter of the model.
    Parameter,
    /// A part of the model that no optimizer trains, such as running statistics.
    Buffer,
    /// State of an optimizer, such as a moment of AdamW.
    OptimizerState,
}

impl TensorKind {
    /// Returns true if the tensor belongs to the model, and not only to its training.
    pub fn is_model(self) -> bool {
        matches!(self, Self::Parameter | Self::Buffer)
    }
}

/// Prints as `parameter`, `buffer` or `optimizer state`.
impl std::fmt::Display for TensorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Parameter => "parameter",
            Self::Buffer => "buffer",
            Self::OptimizerState => "optimizer state",
        })
    }
}

/// A tensor to save: the same on every rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name, unique in the checkpoint, such as the parameter's path. Any text of 1 to 4096 bytes except `__metadata__`,
    /// which safetensors reserves.
    pub name: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<usize>,
    /// Element type of the tensor.
    pub dtype: Dtype,
    /// Purpose of the tensor.
    pub kind: TensorKind,
    /// Layout on the ranks that save.
    pub layout: Layout,
    /// Additional data to save with the tensor, such as the optimizer's group and slot.
    pub metadata: Map<String, Value>,
}

impl TensorSpec {
    /// Describes a tensor, without additional metadata.
    pub fn new(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
        kind: TensorKind,
        layout: Layout,
    ) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            dtype,
            kind,
            layout,
            metadata: Map::new(),
        }
    }

    /// Adds an entry to the metadata.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }
}

/// Checks a tensor's name, shape and dtype, and returns the size of an element in bytes. Errors describe the problem.
pub(crate) fn check_tensor(name: &str, shape: &[usize], dtype: Dtype) -> Result<usize, String> {
    if name.is_empty() || name == "__metadata__" || name.len() > MAX_NAME_BYTES {
        return Err(format!(
            "its name must be 1 to {MAX_NAME_BYTES} bytes of text other than __metadata__"
        ));
    }
    if shape.len() > MAX_DIMS {
        return Err(format!(
            "it has {} dims, but at most {MAX_DIMS} are allowed",
            shape.len()
        ));
    }
    let bits = dtype.bitsize();
    if !bits.is_multiple_of(8) {
        return Err(format!(
            "elements of {dtype} are not whole bytes; pack them into U8"
        ));
    }
    let item_bytes = bits / 8;
    let num_bytes = num_elements(shape).and_then(|number| number.checked_mul(item_bytes));
    if num_bytes.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
        return Err(format!(
            "its shape {shape:?} is too large to count its bytes"
        ));
    }
    Ok(item_bytes)
}
