//! The index of a step: the files, the parts of tensors in them, and their checksums.

use std::ops::Range;
use std::path::Path;

use burn_fsdp_mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::checksum::crc32;
use crate::{Checksums, Dtype, Error, Layout, Region, TensorKind, TrainingState};

mod validation;

/// Name of the index in the folder of a step.
pub(crate) const INDEX_FILE: &str = "index.json";

/// Name of the file with the checksum of the index.
pub(crate) const SEAL_FILE: &str = "index.json.crc32";

/// Name of the format, stored in every index.
const FORMAT: &str = "burn-fsdp-checkpoint";

/// The version of the format that this crate writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// The description of a step: everything except the bytes of its tensors.
///
/// An index that was read or is about to be written is valid. Names are unique. The parts of every tensor tile it
/// without gap or overlap, and the parts in every file tile the file after its header. Every range is inside its file,
/// and every file is in the folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    format: String,
    version: u32,
    /// Number of ranks that saved the step, with one file each.
    pub world_size: usize,
    /// Mesh of the ranks that saved the step.
    #[serde(deserialize_with = "read_mesh")]
    pub mesh: Mesh,
    /// Bytes that one checksum covers; the last chunk of a part may be shorter.
    pub chunk_bytes: u64,
    /// The files, in rank order.
    pub files: Vec<FileEntry>,
    /// The tensors, in the order of the model.
    pub tensors: Vec<TensorEntry>,
    /// State of the training run when the step was saved.
    pub training: TrainingState,
    /// The model's configuration.
    pub model: Value,
}

/// The file of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the folder of the step.
    pub name: String,
    /// Size of the whole file in bytes.
    pub bytes: u64,
    /// Number of bytes before the first tensor.
    pub header_bytes: u64,
    /// CRC-32 of the bytes before the first tensor.
    pub header_crc32: u32,
}

/// One tensor and its parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name of the tensor, unique in the index.
    pub name: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<usize>,
    /// Element type of the tensor.
    pub dtype: Dtype,
    /// Kind of the tensor.
    pub kind: TensorKind,
    /// Layout on the ranks that saved the tensor. For the positions of the parts, see [`PartEntry::region`].
    pub layout: Layout,
    /// Additional data that was saved with the tensor.
    pub metadata: Map<String, Value>,
    /// Parts of the tensor, each stored once.
    pub parts: Vec<PartEntry>,
}

/// One part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartEntry {
    /// Index of the part's file in [`Index::files`].
    pub file: usize,
    /// The part's bytes in that file.
    pub bytes: Range<u64>,
    /// Elements of the tensor that the part holds.
    pub region: Region,
    /// CRC-32 of each chunk of [`chunk_bytes`](Index::chunk_bytes) bytes of the part.
    pub crc32: Checksums,
}

/// The fields of an index except its format and version.
pub(crate) struct IndexContent {
    pub(crate) mesh: Mesh,
    pub(crate) chunk_bytes: u64,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) training: TrainingState,
    pub(crate) model: Value,
}

impl Index {
    pub(crate) fn new(content: IndexContent) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            world_size: content.files.len(),
            mesh: content.mesh,
            chunk_bytes: content.chunk_bytes,
            files: content.files,
            tensors: content.tensors,
            training: content.training,
            model: content.model,
        }
    }

    /// Reads and validates an index. `path` is for messages.
    pub(crate) fn from_json(path: &Path, json: &[u8]) -> Result<Self, Error> {
        /// The fields that the index of every version has.
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let unreadable = |error: serde_json::Error| {
            Error::invalid(path, format!("it cannot be read as an index: {error}"))
        };
        let head: Head = serde_json::from_slice(json).map_err(unreadable)?;
        if head.format != FORMAT {
            let problem = format!(
                "its format should be {FORMAT:?} but is {:?}",
                crate::shortened(&head.format)
            );
            return Err(Error::invalid(path, problem));
        }
        if head.version != u64::from(FORMAT_VERSION) {
            return Err(Error::Version {
                path: path.to_owned(),
                expected: FORMAT_VERSION,
                got: head.version,
            });
        }
        let index: Self = serde_json::from_slice(json).map_err(unreadable)?;
        index.validate(path)?;
        Ok(index)
    }

    pub(crate) fn to_json(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let mut json = serde_json::to_vec(self)
            .map_err(|error| Error::invalid(path, format!("it cannot be written: {error}")))?;
        json.push(b'\n');
        Ok(json)
    }

    /// Returns the tensor with this name. For many look-ups use [`Step::tensor`](crate::Step::tensor).
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns the total bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorEntry::num_bytes).sum()
    }
}

impl TensorEntry {
    /// Returns the number of elements of the whole tensor.
    pub fn num_elements(&self) -> usize {
        burn_fsdp_mesh::num_elements(&self.shape).unwrap_or(0)
    }

    /// Returns the size of an element in bytes.
    pub fn item_bytes(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// Returns the size of the whole tensor in bytes.
    pub fn num_bytes(&self) -> u64 {
        self.num_elements() as u64 * self.item_bytes() as u64
    }
}

impl PartEntry {
    /// Lists the chunks of the part: `(bytes of the file, checksum)`.
    pub(crate) fn chunks(
        &self,
        chunk_bytes: u64,
    ) -> impl ExactSizeIterator<Item = (Range<u64>, u32)> + '_ {
        self.crc32.0.iter().enumerate().map(move |(index, crc)| {
            let start = self.bytes.start + index as u64 * chunk_bytes;
            (start..(start + chunk_bytes).min(self.bytes.end), *crc)
        })
    }
}

/// Returns the exact content of the file that seals an index.
///
/// A reader recomputes it from the index and compares, so a change to either file is detected.
pub(crate) fn seal(index_json: &[u8]) -> String {
    format!("{:08x} {}\n", crc32(index_json), index_json.len())
}

/// Reads a mesh with a limited number of axes, because a mesh compares every name with every other.
fn read_mesh<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Mesh, D::Error> {
    use serde::de::Error as _;
    const MAX_AXES: usize = 64;
    let axes = Vec::<Axis>::deserialize(deserializer)?;
    if axes.len() > MAX_AXES {
        return Err(D::Error::custom(format!(
            "the mesh has {} axes, but at most {MAX_AXES} are read",
            axes.len()
        )));
    }
    Mesh::try_from(axes).map_err(D::Error::custom)
}
