//! Consolidation: writing a sharded step as plain safetensors files.

mod config;
mod output;
mod target;
mod write;

use std::path::Path;

pub use config::{Consolidated, ConsolidationConfig, PlainTensor};
use output::{split, total_size, wanted};
pub use target::check_outside_steps;
use target::{beside, discard, is_plain, remove_leftovers};
use write::{write_file, write_folder};

use crate::step_around::parent;
use crate::storage::EntryKind;
use crate::{Error, Step, TensorEntry};

/// Writes tensors of the model into one safetensors file, each tensor whole, and returns what it has written.
/// `write_as` selects a tensor by returning a name for it. [`max_shard_size`](ConsolidationConfig::max_shard_size) has
/// no effect.
///
/// The file is written under a hidden name and renamed, so it appears complete or not at all. It gets the permissions
/// of the file that it replaces. At most 16 MiB of tensors are in memory, in addition to
/// [`transpose_bytes`](ConsolidationConfig::transpose_bytes). Optimizer state is never written.
///
/// # Errors
///
/// [`Error::Exists`]; [`Error::InsideStep`]; [`Error::Argument`] if no tensor is selected, if two have the same name,
/// if a tensor to be transposed is not a matrix, or if `out` exists and is not a plain file; the errors of
/// [`Step::read_into`]; [`Error::Io`].
pub fn consolidate_to_file(
    step: &Step,
    out: &Path,
    config: &ConsolidationConfig,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Consolidated, Error> {
    let storage = &**step.storage();
    check_outside_steps(step, out)?;
    let there = storage.kind(out).map_err(Error::io("look for", out))?;
    let is_replaced = there.is_some();
    match there {
        Some(EntryKind::Dir) => {
            return Err(Error::Argument {
                argument: "out",
                expected: "a file, unless a maximum file size (`--max-shard-size`) is set or a folder for transformers is written".to_owned(),
                got: format!("the folder {}", out.display()),
            });
        }
        Some(_) if !config.replace => {
            return Err(Error::Exists {
                path: out.to_owned(),
            });
        }
        Some(EntryKind::File) | None => {}
        // For a link, a pipe or a device, a replacement would damage something that does not belong to the step.
        Some(_) => {
            return Err(Error::Argument {
                argument: "out",
                expected: "a plain file or an unused name".to_owned(),
                got: format!("{}, which is not a plain file", out.display()),
            });
        }
    }
    let tensors = wanted(step, write_as)?;
    let parent = parent(out);
    let made = storage.create_dir_all(parent);
    made.map_err(Error::io("create", parent))?;
    remove_leftovers(storage, out);
    let partial = beside(out)?;
    let all: Vec<_> = tensors.iter().collect();
    let written = write_file(step, &partial, &all, config).and_then(|()| {
        if is_replaced {
            let given = storage.copy_permissions(out, &partial);
            given.map_err(Error::io("set the permissions of", &partial))?;
        }
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

/// Writes tensors of the model into a folder in the format of Hugging Face models. `write_as` selects a tensor by
/// returning a name for it. By default, the file is `model.safetensors`. If the tensors exceed
/// [`max_shard_size`](ConsolidationConfig::max_shard_size), the files are `model-00001-of-00003.safetensors` and so on,
/// with `model.safetensors.index.json`.
///
/// Otherwise it works like [`consolidate_to_file`], but the whole folder is written under a hidden name and renamed.
///
/// # Errors
///
/// The errors of [`consolidate_to_file`]; [`Error::Argument`] for a name in `config` that is not a plain file name.
pub fn consolidate_to_folder(
    step: &Step,
    out: &Path,
    config: &ConsolidationConfig,
    write_as: impl Fn(&TensorEntry) -> Option<PlainTensor>,
) -> Result<Consolidated, Error> {
    let storage = &**step.storage();
    check_outside_steps(step, out)?;
    if storage.exists(out).map_err(Error::io("look for", out))? {
        let is_empty = storage.list(out).is_ok_and(|entries| entries.is_empty());
        if !(config.replace && is_empty) {
            return Err(Error::Exists {
                path: out.to_owned(),
            });
        }
    }
    let names = config.beside.iter().map(|(name, _)| name);
    let mut names = names.chain([&config.file_name]);
    if let Some(name) = names.find(|name| !is_plain(name)) {
        return Err(Error::Argument {
            argument: "config",
            expected: "plain file names".to_owned(),
            got: format!("{name:?}"),
        });
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
