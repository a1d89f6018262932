//! The header of a rank's file, in the format of safetensors.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};

use crate::{Dtype, Error, Limits};

/// Size in bytes of the header length, the number at the start of a file.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// A tensor in a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Bytes of the tensor in the file.
    pub(crate) num_bytes: usize,
}

/// Encodes the header of a file that stores these tensors in this order.
///
/// The header is padded with spaces to a multiple of 8 bytes, as safetensors does. This aligns mapped tensors.
pub(crate) fn encode(
    tensors: Vec<StoredTensor>,
    metadata: HashMap<String, String>,
) -> Result<Vec<u8>, String> {
    let mut offset = 0usize;
    let mut infos = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let end = offset
            .checked_add(tensor.num_bytes)
            .ok_or("its tensors have too many bytes to count")?;
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape,
            data_offsets: (offset, end),
        };
        infos.push((tensor.name, info));
        offset = end;
    }
    let header = Metadata::new(Some(metadata), infos).map_err(|error| error.to_string())?;
    let mut json = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let limit = Limits::default().header_bytes;
    if json.len() as u64 > limit {
        return Err(format!(
            "its header takes {} bytes, but safetensors readers accept at most {limit}",
            json.len()
        ));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// Reads the header of a file of `file_bytes` bytes. `bytes` starts with the 8 bytes of the header's length.
///
/// Duplicate names are an error; other readers keep the last of the tensors.
pub(crate) fn decode(path: &Path, bytes: &[u8], file_bytes: u64) -> Result<Metadata, Error> {
    let json = bytes
        .get(LENGTH_BYTES as usize..)
        .ok_or_else(|| Error::invalid(path, "it is shorter than a safetensors header"))?;
    let parsed: Header = serde_json::from_slice(json)
        .map_err(|error| Error::invalid(path, format!("its header cannot be read: {error}")))?;
    let mut tensors = parsed.tensors;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let metadata = Metadata::new(Some(parsed.metadata), tensors).map_err(|error| {
        let problem = format!("its header is inconsistent: {error}");
        Error::invalid(path, problem)
    })?;
    let end = (bytes.len() as u64).checked_add(metadata.data_len() as u64);
    if end != Some(file_bytes) {
        let problem = format!(
            "its tensors take {} bytes after a header of {}, but it has {file_bytes} bytes",
            metadata.data_len(),
            bytes.len()
        );
        return Err(Error::invalid(path, problem));
    }
    Ok(metadata)
}

struct Header {
    metadata: HashMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the header of a safetensors file")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut names = std::collections::HashSet::new();
        let mut header = Header {
            metadata: HashMap::new(),
            tensors: Vec::new(),
        };
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{name:?} occurs twice")));
            }
            match name.as_str() {
                "__metadata__" => header.metadata = map.next_value()?,
                _ => header.tensors.push((name, map.next_value()?)),
            }
        }
        Ok(header)
    }
}
