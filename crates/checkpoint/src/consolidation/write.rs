//! Writes the files of a consolidation.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::config::ConsolidationConfig;
use super::output::{Output, total_size};
use crate::shard_header::{self, StoredTensor};
use crate::storage::write_synced;
use crate::{Error, Region, Step, TensorEntry};

/// Bytes of tensors that are copied at a time.
const BLOCK_BYTES: usize = 16 << 20;

/// The content of `model.safetensors.index.json`.
#[derive(Serialize)]
struct WeightIndex {
    metadata: WeightMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct WeightMetadata {
    total_size: u64,
}

/// Writes a file for each shard, and their index if there are several. Returns the names of the files.
pub(super) fn write_folder(
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
            1 => format!("{}.safetensors", config.file_name),
            total => format!(
                "{}-{:05}-of-{total:05}.safetensors",
                config.file_name,
                number + 1
            ),
        };
        write_file(step, &dir.join(&name), shard, config)?;
        let tensors = shard.iter().map(|tensor| tensor.plain.name.clone());
        weight_map.extend(tensors.map(|tensor| (tensor, name.clone())));
        names.push(name);
    }
    if shards.len() > 1 {
        let path = dir.join(format!("{}.safetensors.index.json", config.file_name));
        let total_size = total_size(shards.iter().flatten().copied());
        let index = WeightIndex {
            metadata: WeightMetadata { total_size },
            weight_map,
        };
        let json = serde_json::to_vec_pretty(&index)
            .map_err(|error| Error::invalid(&path, error.to_string()))?;
        write_synced(storage, &path, &json)?;
    }
    for (name, bytes) in &config.beside {
        write_synced(storage, &dir.join(name), bytes)?;
    }
    storage.sync_dir(dir).map_err(Error::io("sync", dir))?;
    Ok(names)
}

/// Writes whole tensors into one file, widest elements first, which aligns every tensor.
pub(super) fn write_file(
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
    // The lock shows others that a process is writing the file. Storage without locks has no such check.
    let _lock = step.storage().lock(path);
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
    write(&header)?;
    for tensor in tensors {
        if tensor.plain.is_transposed {
            transpose(step, tensor.entry, config.transpose_bytes, &mut write)?
        } else {
            copy(step, tensor.entry, &mut write)?
        }
    }
    file.sync().map_err(Error::io("sync", path))
}

/// Passes a whole tensor to `write`, block by block.
fn copy(
    step: &Step,
    tensor: &TensorEntry,
    write: &mut impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut block = Vec::new();
    let len = BLOCK_BYTES / tensor.item_bytes();
    for start in (0..tensor.num_elements()).step_by(len) {
        let end = (start + len).min(tensor.num_elements());
        block.resize((end - start) * tensor.item_bytes(), 0);
        step.read_into(&tensor.name, &Region::Flat(start..end), &mut block)?;
        write(&block)?;
    }
    Ok(())
}

/// Passes a matrix to `write` column by column, as the rows of its transpose.
///
/// Assembles as many columns at a time as fit into `max_bytes`, from blocks of rows.
fn transpose(
    step: &Step,
    tensor: &TensorEntry,
    max_bytes: usize,
    write: &mut impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let &[num_rows, num_columns] = &tensor.shape[..] else {
        unreachable!("checked before anything was written");
    };
    let item_bytes = tensor.item_bytes();
    if num_rows == 0 || num_columns == 0 {
        return Ok(());
    }
    let width = (max_bytes / (num_rows * item_bytes)).clamp(1, num_columns);
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    for start in (0..num_columns).step_by(width) {
        let width = width.min(num_columns - start);
        let height = (BLOCK_BYTES / (width * item_bytes)).clamp(1, num_rows);
        columns.resize(width * num_rows * item_bytes, 0);
        for top in (0..num_rows).step_by(height) {
            let height = height.min(num_rows - top);
            rows.resize(height * width * item_bytes, 0);
            let region = Region::Box {
                offsets: vec![top, start],
                sizes: vec![height, width],
            };
            step.read_into(&tensor.name, &region, &mut rows)?;
            let part = Columns {
                bytes: &mut columns,
                height: num_rows,
                top,
            };
            part.fill(&rows, width, item_bytes);
        }
        write(&columns)?;
    }
    Ok(())
}

/// Consecutive columns of a matrix.
struct Columns<'a> {
    bytes: &'a mut [u8],
    /// Number of elements in a column.
    height: usize,
    /// The first row that the next rows fill.
    top: usize,
}

impl Columns<'_> {
    /// Transposes rows of `width` elements into the columns.
    fn fill(self, rows: &[u8], width: usize, item_bytes: usize) {
        /// Side of a tile, in elements. The tiles of the source and the target both fit the nearest cache.
        const TILE: usize = 32;
        let num_rows = rows.len() / (width * item_bytes);
        for (first_row, first_column) in (0..num_rows)
            .step_by(TILE)
            .flat_map(|row| (0..width).step_by(TILE).map(move |column| (row, column)))
        {
            for column in first_column..(first_column + TILE).min(width) {
                for row in first_row..(first_row + TILE).min(num_rows) {
                    let from = (row * width + column) * item_bytes;
                    let to = (column * self.height + self.top + row) * item_bytes;
                    self.bytes[to..to + item_bytes].copy_from_slice(&rows[from..from + item_bytes]);
                }
            }
        }
    }
}
