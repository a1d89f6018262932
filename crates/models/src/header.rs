//! The header of a safetensors file, which may come from an untrusted source.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// Maximum length of a header, the same as in the safetensors crate. It prevents a wrong length from requesting more
/// memory than any real header needs.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// First bytes of a Git LFS pointer. As a length, they would be larger than any file.
const LFS: &[u8; LENGTH_BYTES as usize] = b"version ";

/// Size in bytes of the length field before the header.
const LENGTH_BYTES: u64 = 8;

/// The header of a safetensors file, checked against the length of the file.
///
/// The safetensors crate performs the same checks, but its errors do not name the tensor whose size is wrong.
#[derive(Debug)]
pub(crate) struct Header {
    /// Position of the first byte of the tensors' data.
    pub(crate) data_start: u64,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
}

/// The header's entry for one tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct TensorEntry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The header's JSON.
#[derive(Deserialize)]
struct HeaderJson {
    #[serde(rename = "__metadata__")]
    _metadata: Option<BTreeMap<String, String>>,
    #[serde(flatten, deserialize_with = "each_once")]
    tensors: BTreeMap<String, TensorEntry>,
}

/// Reads the tensors. A duplicate name is an error, because either entry could be meant.
fn each_once<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, TensorEntry>, D::Error> {
    struct EachOnce;

    impl<'de> Visitor<'de> for EachOnce {
        type Value = BTreeMap<String, TensorEntry>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the tensors of a safetensors file")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut tensors = BTreeMap::new();
            while let Some((name, entry)) = map.next_entry::<String, TensorEntry>()? {
                if tensors.contains_key(&name) {
                    return Err(A::Error::custom(format!("tensor {name} occurs twice")));
                }
                tensors.insert(name, entry);
            }
            Ok(tensors)
        }
    }

    deserializer.deserialize_map(EachOnce)
}

impl Header {
    /// Reads and checks a header.
    ///
    /// The outer error is an I/O error. The inner error describes what is wrong with the file.
    pub(crate) fn read(file: &mut impl Read, file_bytes: u64) -> io::Result<Result<Self, String>> {
        if file_bytes < LENGTH_BYTES {
            return Ok(Err(format!(
                "{file_bytes} bytes are too few for the header's length; is the file truncated?"
            )));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length)?;
        if length == *LFS {
            return Ok(Err(
                "it is a Git LFS pointer to a file that was not fetched; run `git lfs pull` in the folder".to_owned(),
            ));
        }
        let length = u64::from_le_bytes(length);
        let available = file_bytes - LENGTH_BYTES;
        if length > available.min(MAX_HEADER_BYTES) {
            return Ok(Err(format!(
                "its header claims {length} bytes, but {available} follow and {MAX_HEADER_BYTES} \
                 are allowed; is the file truncated?"
            )));
        }
        let mut json = vec![0; length as usize];
        file.read_exact(&mut json)?;
        Ok(Self::parse(&json, available - length))
    }

    fn parse(json: &[u8], data_bytes: u64) -> Result<Self, String> {
        let HeaderJson { tensors, .. } = serde_json::from_slice(json)
            .map_err(|error| format!("its header is invalid: {error}"))?;
        for (name, entry) in &tensors {
            entry
                .check(data_bytes)
                .map_err(|problem| format!("tensor {name} {problem}"))?;
        }
        check_tiling(&tensors, data_bytes)?;
        Ok(Self {
            data_start: LENGTH_BYTES + json.len() as u64,
            tensors,
        })
    }
}

impl TensorEntry {
    /// Returns the position of the tensor's first byte after the header.
    pub(crate) fn start(&self) -> u64 {
        self.data_offsets.0
    }

    fn check(&self, data_bytes: u64) -> Result<(), String> {
        let (start, end) = self.data_offsets;
        if end < start || end > data_bytes {
            return Err(format!(
                "claims bytes {start} to {end} of {data_bytes}; is the file truncated?"
            ));
        }
        let claimed = end - start;
        match self.num_bytes() {
            Some(needed) if needed == claimed => Ok(()),
            Some(needed) => Err(format!(
                "has {claimed} bytes, its shape {:?} of type {} needs {needed}",
                self.shape, self.dtype
            )),
            // Types of unknown size are never loaded.
            None if element_bytes(&self.dtype).is_none() => Ok(()),
            None => Err(format!("has an impossibly large shape {:?}", self.shape)),
        }
    }

    fn num_bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(element_bytes(&self.dtype)?, |bytes, &size| {
                bytes.checked_mul(size as u64)
            })
    }
}

/// Returns the size of an element in bytes, or `None` for a type that is not in this list.
fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" => Some(8),
        _ => None,
    }
}

/// Checks that the tensors cover the data without overlaps and without gaps.
fn check_tiling(tensors: &BTreeMap<String, TensorEntry>, data_bytes: u64) -> Result<(), String> {
    let mut by_offset: Vec<_> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut covered = 0;
    for (name, entry) in by_offset {
        let (start, end) = entry.data_offsets;
        if start != covered {
            return Err(format!(
                "tensor {name} starts at byte {start}, but the one before it ends at {covered}"
            ));
        }
        covered = end;
    }
    if covered == data_bytes {
        Ok(())
    } else {
        Err(format!("its tensors end at byte {covered} of {data_bytes}"))
    }
}
