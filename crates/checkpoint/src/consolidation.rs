//! From a sharded step to plain safetensors files.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::folder_name::{Hidden, nonce, parse_step};
use crate::index::{INDEX_FILE, SEAL_FILE};
use crate::shard_header::{self, StoredTensor};
use crate::storage::{EntryKind, Storage, write_synced};
use crate::tensor::check_tensor;
use crate::{Error, Step, TensorEntry};

mod copying;

use copying::{copy, transpose};

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

/// `model.safetensors.index.json`.
#[derive(Serialize)]
struct WeightIndex {
    metadata: WeightMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct WeightMetadata {
    total_size: u64,
}

/// Writes the model's tensors for which `write_as` gives a name into one safetensors file, whole.
/// [`max_shard_size`](ConsolidationConfig::max_shard_size) has no effect.
///
/// The file is written beside and renamed, so that it is there whole or not at all. At most 16 MiB of
/// tensors are in memory, and what [`transpose_bytes`](ConsolidationConfig::transpose_bytes) allows.
/// Optimizer state is never written.
///
/// # Errors
///
/// [`Error::Exists`]; [`Error::InsideStep`]; [`Error::Argument`] if no tensor is wanted, if two get one name, or if
/// one that is no matrix should be transposed; those of [`Step::read_into`]; [`Error::Io`].
pub fn consolidate_to_file(
    step: &Step,
    out: &Path,
    config: &ConsolidationConfig,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Consolidated, Error> {
    let storage = &**step.storage();
    check_outside_steps(storage, step, out)?;
    if !config.replace && storage.exists(out).map_err(Error::io("look for", out))? {
        return Err(Error::Exists {
            path: out.to_owned(),
        });
    }
    let tensors = wanted(step, write_as)?;
    let parent = parent(out);
    let made = storage.create_dir_all(parent);
    made.map_err(Error::io("create", parent))?;
    remove_leftovers(storage, out);
    let partial = beside(out)?;
    let all: Vec<_> = tensors.iter().collect();
    let written = write_file(step, &partial, &all, config).and_then(|()| {
        let renamed = storage.rename(&partial, out);
        renamed.map_err(Error::io("rename", &partial))
    });
    if let Err(error) = written {
        discard(storage.remove_file(&partial), &partial);
        return Err(error);
    }
    let synced = storage.sync_dir(parent);
    synced.map_err(Error::io("sync", parent))?;
    Ok(Consolidated {
        files: vec![out.to_owned()],
        num_tensors: tensors.len(),
        total_size: total_size(&tensors),
    })
}

/// Writes the model's tensors for which `write_as` gives a name into a folder as Hugging Face's models have
/// them: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
/// `model.safetensors.index.json` if they do not fit
/// [`max_shard_size`](ConsolidationConfig::max_shard_size).
///
/// Otherwise as [`consolidate_to_file`]; here the folder as a whole is written beside and renamed.
///
/// # Errors
///
/// As [`consolidate_to_file`].
pub fn consolidate_to_folder(
    step: &Step,
    out: &Path,
    config: &ConsolidationConfig,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Consolidated, Error> {
    let storage = &**step.storage();
    check_outside_steps(storage, step, out)?;
    if storage.exists(out).map_err(Error::io("look for", out))? {
        let is_empty = storage.list(out).is_ok_and(|entries| entries.is_empty());
        if !(config.replace && is_empty) {
            return Err(Error::Exists {
                path: out.to_owned(),
            });
        }
    }
    let tensors = wanted(step, write_as)?;
    let shards = split(&tensors, config.max_shard_size);
    let parent = parent(out);
    let made = storage.create_dir_all(parent);
    made.map_err(Error::io("create", parent))?;
    let partial = beside(out)?;
    let made = storage.create_dir(&partial);
    made.map_err(Error::io("create", &partial))?;
    let written = write_folder(step, &partial, &shards, config).and_then(|names| {
        let renamed = storage.rename(&partial, out);
        renamed.map_err(Error::io("rename", &partial))?;
        Ok(names)
    });
    let names = match written {
        Ok(names) => names,
        Err(error) => {
            discard(storage.remove_tree(&partial), &partial);
            return Err(error);
        }
    };
    let synced = storage.sync_dir(parent);
    synced.map_err(Error::io("sync", parent))?;
    Ok(Consolidated {
        files: names.iter().map(|name| out.join(name)).collect(),
        num_tensors: tensors.len(),
        total_size: total_size(&tensors),
    })
}

/// A tensor of a step, and how it is written.
#[derive(Debug, Clone)]
struct Output<'a> {
    entry: &'a TensorEntry,
    plain: PlainTensor,
}

impl Output<'_> {
    /// The shape in the output.
    fn shape(&self) -> Vec<usize> {
        let mut shape = self.entry.shape.clone();
        if self.plain.is_transposed {
            shape.reverse();
        }
        shape
    }
}

/// Refuses an output that would replace a file of a step, lie among them, or pass for a step.
fn check_outside_steps(storage: &dyn Storage, step: &Step, out: &Path) -> Result<(), Error> {
    let refused = |step: &Path| Error::InsideStep {
        out: out.to_owned(),
        step: step.to_owned(),
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    if parse_step(&name).is_some() || Hidden::parse(&name).is_some() {
        return Err(refused(parent(out)));
    }
    // Folders that are not there yet will be made, and are in nothing but those above them.
    let mut there = out;
    while !storage.exists(there).unwrap_or(false) && there.parent().is_some() {
        there = parent(there);
    }
    if there.as_os_str().is_empty() {
        there = Path::new(".");
    }
    let canonical = |path: &Path| storage.canonical(path).unwrap_or_else(|_| path.to_owned());
    let (there, own) = (canonical(there), canonical(step.path()));
    for folder in there.ancestors() {
        let has = |file| storage.exists(&folder.join(file)).unwrap_or(false);
        if folder == own || has(INDEX_FILE) && has(SEAL_FILE) {
            return Err(refused(folder));
        }
    }
    Ok(())
}

fn wanted(
    step: &Step,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Vec<Output<'_>>, Error> {
    let wrong = |expected: &str, got: String| Error::Argument {
        argument: "write_as",
        expected: expected.to_owned(),
        got,
    };
    let mut names = HashSet::new();
    let mut outputs = Vec::new();
    for entry in step.index().tensors.iter() {
        let plain = match entry.kind.is_model() {
            true => write_as(entry),
            false => None,
        };
        let Some(plain) = plain else { continue };
        check_tensor(&plain.name, &entry.shape, entry.dtype)
            .map_err(|problem| wrong("a name", format!("{:?}: {problem}", plain.name)))?;
        if plain.is_transposed && entry.shape.len() != 2 {
            let got = format!("{:?} of shape {:?}", entry.name, entry.shape);
            return Err(wrong("two dims of what is transposed", got));
        }
        if !names.insert(plain.name.clone()) {
            let got = format!("{:?} again, for {:?}", plain.name, entry.name);
            return Err(wrong("a name for each tensor", got));
        }
        outputs.push(Output { entry, plain });
    }
    match outputs.is_empty() {
        true => {
            let got = format!("none for all in {}", step.path().display());
            Err(wrong("a name for some tensor of the model", got))
        }
        false => Ok(outputs),
    }
}

/// Tensors in their order, filed until a file is full.
fn split<'a, 'b>(tensors: &'a [Output<'b>], max_size: Option<u64>) -> Vec<Vec<&'a Output<'b>>> {
    let mut shards: Vec<Vec<&Output<'_>>> = Vec::new();
    let mut size = 0u64;
    for tensor in tensors {
        let with_it = size.saturating_add(tensor.entry.num_bytes());
        match shards.last_mut() {
            Some(shard) if max_size.is_none_or(|most| with_it <= most) => {
                shard.push(tensor);
                size = with_it;
            }
            _ => {
                shards.push(vec![tensor]);
                size = tensor.entry.num_bytes();
            }
        }
    }
    shards
}

fn write_folder(
    step: &Step,
    dir: &Path,
    shards: &[Vec<&Output<'_>>],
    config: &ConsolidationConfig,
) -> Result<Vec<String>, Error> {
    let storage = &**step.storage();
    let mut names = Vec::new();
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            total => format!("model-{:05}-of-{total:05}.safetensors", number + 1),
        };
        write_file(step, &dir.join(&name), shard, config)?;
        let tensors = shard.iter().map(|tensor| tensor.plain.name.clone());
        weight_map.extend(tensors.map(|tensor| (tensor, name.clone())));
        names.push(name);
    }
    if shards.len() > 1 {
        let path = dir.join("model.safetensors.index.json");
        let total_size = total_size(shards.iter().flatten().copied());
        let index = WeightIndex {
            metadata: WeightMetadata { total_size },
            weight_map,
        };
        let json = serde_json::to_vec_pretty(&index)
            .map_err(|error| Error::invalid(&path, error.to_string()))?;
        write_synced(storage, &path, &json)?;
    }
    storage.sync_dir(dir).map_err(Error::io("sync", dir))?;
    Ok(names)
}

/// Writes whole tensors into one file, wide elements first, so that all are aligned.
fn write_file(
    step: &Step,
    path: &Path,
    tensors: &[&Output<'_>],
    config: &ConsolidationConfig,
) -> Result<(), Error> {
    let mut tensors = tensors.to_vec();
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.entry.item_bytes()));
    let stored = tensors.iter().map(|tensor| StoredTensor {
        name: tensor.plain.name.clone(),
        dtype: tensor.entry.dtype,
        shape: tensor.shape(),
        num_bytes: tensor.entry.num_elements() * tensor.entry.item_bytes(),
    });
    let header = shard_header::encode(stored.collect(), config.metadata.clone())
        .map_err(|problem| Error::invalid(path, problem))?;
    let file = step.storage().create_file(path);
    let mut file = file.map_err(Error::io("create", path))?;
    // Tells others that somebody is at work on it. Where there are no locks, nobody asks.
    let _lock = step.storage().lock(path);
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
    write(&header)?;
    for tensor in tensors {
        match tensor.plain.is_transposed {
            false => copy(step, tensor.entry, &mut write)?,
            true => transpose(step, tensor.entry, config.transpose_bytes, &mut write)?,
        }
    }
    file.sync().map_err(Error::io("sync", path))
}

fn total_size<'a, 'b: 'a>(tensors: impl IntoIterator<Item = &'a Output<'b>>) -> u64 {
    tensors
        .into_iter()
        .map(|tensor| tensor.entry.num_bytes())
        .sum()
}

fn parent(out: &Path) -> &Path {
    out.parent().unwrap_or(Path::new(""))
}

/// Removes the files of earlier attempts at the same output whose processes are dead: nobody locks them.
fn remove_leftovers(storage: &dyn Storage, out: &Path) {
    let folder = match parent(out) {
        folder if folder.as_os_str().is_empty() => Path::new("."),
        folder => folder,
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let begin = format!(".{name}.partial-");
    for entry in storage.list(folder).unwrap_or_default() {
        let nonce = entry.name.strip_prefix(&begin);
        let is_ours = nonce.is_some_and(|nonce| {
            nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        if !is_ours || entry.kind != EntryKind::File {
            continue;
        }
        let path = folder.join(&entry.name);
        let lock = storage.lock(&path).ok().flatten();
        if lock.is_some_and(|lock| lock.is_effective()) {
            discard(storage.remove_file(&path), &path);
        }
    }
}

/// A hidden name in the same folder.
fn beside(out: &Path) -> Result<PathBuf, Error> {
    let name = out.file_name().ok_or_else(|| Error::Argument {
        argument: "out",
        expected: "the name of a file or folder".to_owned(),
        got: out.display().to_string(),
    })?;
    let name = name.to_string_lossy();
    Ok(out.with_file_name(format!(".{name}.partial-{}", nonce())))
}

/// What remains of a failed attempt harms nothing but space.
fn discard(removed: std::io::Result<()>, path: &Path) {
    if let Err(error) = removed {
        tracing::warn!(path = %path.display(), %error, "cannot remove an unfinished file");
    }
}
