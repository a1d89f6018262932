//! The bodies of the fuzz targets. Not part of the interface.
//!
//! They are here so the nightly fuzzers and the tests on stable run the same code.

use std::path::Path;
use std::sync::Arc;

use crate::index::{INDEX_FILE, SEAL_FILE, seal};
use crate::shard_header::LENGTH_BYTES;
use crate::storage::Memory;
use crate::{Error, Index, Inspection, Limits, ReadPlan, Region, Step, Verification, shard_header};

/// Maximum size in bytes of a tensor that is read as a whole.
const MAX_READ_BYTES: u64 = 1 << 20;

/// Reads any bytes as an index. Returns an error, or checks that plans can be created from the index.
pub fn index(data: &[u8]) -> Result<(), Error> {
    let index = Index::from_json(Path::new(INDEX_FILE), data)?;
    let wholes: Vec<_> = index
        .tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), Region::whole(&tensor.shape)))
        .filter(|(_, region)| region.len() < 1 << 16)
        .collect();
    let wanted = wholes.iter().map(|(name, region)| (*name, region));
    let plan = ReadPlan::new(&index, wanted)?;
    let in_files: u64 = index.files.iter().map(|file| file.bytes).sum();
    assert!(plan.num_bytes() <= in_files, "reads more than there is");
    Ok(())
}

/// Reads any bytes as the header of a rank's file.
pub fn shard_header(data: &[u8]) -> Result<(), Error> {
    let path = Path::new("rank");
    let length = data.first_chunk().map(|length| u64::from_le_bytes(*length));
    let end = length.and_then(|length| usize::try_from(length.checked_add(LENGTH_BYTES)?).ok());
    let header = end.and_then(|end| data.get(..end));
    let header = header.ok_or_else(|| Error::invalid(path, "it ends within its header"))?;
    let header = shard_header::decode(path, header, data.len() as u64)?;
    for (name, info) in header.tensors() {
        assert!(info.data_offsets.0 <= info.data_offsets.1, "{name}");
    }
    Ok(())
}

/// Reads any bytes as a whole step with one file. The bytes up to the first zero byte are the index, and the bytes
/// after it are the file. The seal is valid, because a malicious writer can compute it.
pub fn step(data: &[u8]) -> Result<(), Error> {
    let cut = data.iter().position(|byte| *byte == 0);
    let (json, file) = match cut {
        Some(cut) => (&data[..cut], &data[cut + 1..]),
        None => (data, &[][..]),
    };
    let memory = Memory::new();
    let dir = Path::new("step-000001");
    for (name, bytes) in [
        (INDEX_FILE, json),
        (SEAL_FILE, seal(json).as_bytes()),
        ("rank-00000.safetensors", file),
    ] {
        let path = dir.join(name);
        memory
            .write(&path, bytes.to_vec())
            .map_err(Error::io("write", path))?;
    }
    let step = Step::open_in(Arc::new(memory), dir, Limits::default())?;
    let printed = Inspection::new(&step).to_string();
    assert!(!printed.is_empty());
    let damage = step.damage(|_| ());
    let unverified = Step::open_in(step.storage().clone(), dir, Limits::default())?
        .verification(Verification::None);
    for tensor in &step.index().tensors {
        if tensor.num_bytes() > MAX_READ_BYTES {
            continue;
        }
        let whole = Region::whole(&tensor.shape);
        let verified = step.read(&tensor.name, &whole);
        let raw = unverified.read(&tensor.name, &whole);
        match verified {
            Ok(bytes) => assert_eq!(Some(bytes), raw.ok(), "{}", tensor.name),
            Err(_) => assert!(!damage.is_empty(), "damage went unnoticed"),
        }
    }
    damage.into_iter().next().map_or(Ok(()), Err)
}
