//! What to write, how, and what was written.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Serialize;

use crate::TensorEntry;

/// What to write, and how.
#[derive(Debug, Clone)]
pub struct ConsolidationConfig {
    /// In a folder: begin a new file before one would have more bytes of tensors than this. A tensor is
    /// never split, so that a larger one has a file of its own. One file if `None`.
    pub max_shard_size: Option<u64>,
    /// The metadata of the files. By default `format: pt`, which readers of Hugging Face's models ask
    /// for.
    pub metadata: HashMap<String, String>,
    /// Whether to replace an output that is there. A folder is replaced only if it is empty.
    pub replace: bool,
    /// Memory for a matrix that is written transposed. One with more bytes is read in as many passes as
    /// it takes, each with some of its columns; at least one column is in memory.
    pub transpose_bytes: usize,
}

impl Default for ConsolidationConfig {
    fn default() -> Self {
        Self {
            max_shard_size: None,
            metadata: HashMap::from([("format".to_owned(), "pt".to_owned())]),
            replace: false,
            transpose_bytes: 256 << 20,
        }
    }
}

/// How a tensor of a step is written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlainTensor {
    /// Its name in the output.
    pub name: String,
    /// Whether its two dims are exchanged, as between Burn's linear weights, `[in, out]`, and those of
    /// PyTorch.
    pub is_transposed: bool,
}

impl PlainTensor {
    /// As the step has it.
    pub fn unchanged(tensor: &TensorEntry) -> Self {
        Self {
            name: tensor.name.clone(),
            is_transposed: false,
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Consolidated {
    /// The files, in order; the index of a sharded model is not among them.
    pub files: Vec<PathBuf>,
    /// Number of tensors.
    pub num_tensors: usize,
    /// Bytes of all tensors.
    pub total_size: u64,
}
