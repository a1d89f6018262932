//! The configuration and the result of a consolidation.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Serialize;

use crate::TensorEntry;

/// Options for a consolidation.
#[derive(Debug, Clone)]
pub struct ConsolidationConfig {
    /// Maximum bytes of tensors in each file of a folder; one file if `None`. A tensor is never split: a larger tensor
    /// gets a separate file.
    pub max_shard_size: Option<u64>,
    /// The metadata of the files. The default is `format: pt`, which readers of Hugging Face models require.
    pub metadata: HashMap<String, String>,
    /// Name of the files of a folder. With the default, `model`, the files are `model.safetensors`, or
    /// `model-00001-of-00003.safetensors` and so on.
    pub file_name: String,
    /// Additional files for a folder, each with its name, for example `config.json`. They appear together with the
    /// folder.
    pub beside: Vec<(String, Vec<u8>)>,
    /// True to replace an existing output. A folder can be replaced only if it is empty.
    pub replace: bool,
    /// Maximum bytes in memory for a matrix that is written transposed. A larger matrix is read in several passes, each
    /// for some of its columns (at least one).
    pub transpose_bytes: usize,
}

impl Default for ConsolidationConfig {
    fn default() -> Self {
        Self {
            max_shard_size: None,
            metadata: HashMap::from([("format".to_owned(), "pt".to_owned())]),
            file_name: "model".to_owned(),
            beside: Vec::new(),
            replace: false,
            transpose_bytes: 64 << 20,
        }
    }
}

/// The name and orientation with which a step's tensor is written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlainTensor {
    /// Name of the tensor in the output.
    pub name: String,
    /// True to swap the two dims: linear weights are `[in, out]` in Burn and `[out, in]` in PyTorch.
    pub is_transposed: bool,
}

impl PlainTensor {
    /// Returns the tensor's own name and orientation.
    pub fn unchanged(tensor: &TensorEntry) -> Self {
        Self {
            name: tensor.name.clone(),
            is_transposed: false,
        }
    }
}

/// The files and tensors that a consolidation has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Consolidated {
    /// The safetensors files, in order.
    pub files: Vec<PathBuf>,
    /// Number of tensors written.
    pub num_tensors: usize,
    /// Total bytes of the tensors written.
    pub total_size: u64,
}
