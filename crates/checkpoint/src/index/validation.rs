//! Validation of an index, which may come from an untrusted source.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::Path;

use super::{FileEntry, Index, PartEntry, TensorEntry};
use crate::checksum::CHUNK_LIMITS;
use crate::shard_header::LENGTH_BYTES;
use crate::tensor::check_tensor;
use crate::{Error, Region};

/// Maximum number of boxes in a tensor. Boxes are compared in pairs.
const MAX_BOXES: usize = 1 << 14;

/// The valid loss scales. Losses are scaled in `f32`.
const LOSS_SCALES: RangeInclusive<f64> = f32::MIN_POSITIVE as f64..=f32::MAX as f64;

impl Index {
    /// Checks the guarantees of a valid [`Index`]. `path` is for messages.
    pub(crate) fn validate(&self, path: &Path) -> Result<(), Error> {
        let invalid = |problem: String| Err(Error::invalid(path, problem));
        if !CHUNK_LIMITS.contains(&self.chunk_bytes) {
            return invalid(format!(
                "chunk_bytes is {} but should be {} to {}",
                self.chunk_bytes,
                CHUNK_LIMITS.start(),
                CHUNK_LIMITS.end()
            ));
        }
        let (world_size, num_files) = (self.world_size, self.files.len());
        if world_size != self.mesh.size() || world_size != num_files {
            return invalid(format!(
                "world_size is {world_size}, but the mesh has {} ranks and there are {num_files} files",
                self.mesh.size()
            ));
        }
        if let Some(loss_scale) = self.training.loss_scale
            && !LOSS_SCALES.contains(&loss_scale.scale)
        {
            return invalid(format!(
                "the loss scale is {:?} but should be {:e} to {:e}",
                loss_scale.scale,
                LOSS_SCALES.start(),
                LOSS_SCALES.end()
            ));
        }
        self.validate_files(path)?;
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            let invalid = |problem| Err(Error::invalid_tensor(path, &tensor.name, problem));
            if !names.insert(&tensor.name) {
                return invalid("two tensors have this name".to_owned());
            }
            if let Err(problem) = check_tensor(&tensor.name, &tensor.shape, tensor.dtype)
                .and_then(|item_bytes| self.check_parts(tensor, item_bytes))
                .and_then(|()| check_tiling(tensor))
            {
                return invalid(problem);
            }
        }
        self.validate_file_tiling(path)
    }

    fn validate_files(&self, path: &Path) -> Result<(), Error> {
        let mut names = HashSet::new();
        for file in &self.files {
            let problem = match () {
                () if !is_plain_name(&file.name) => {
                    "must have a plain name that ends in .safetensors"
                }
                () if !names.insert(&file.name) => "occurs twice",
                () if !has_sound_sizes(file) => "has impossible sizes",
                () => continue,
            };
            let name = crate::shortened(&file.name);
            return Err(Error::invalid(path, format!("the file {name:?} {problem}")));
        }
        let total = self.files.iter().try_fold(0u64, |total, file| {
            total
                .checked_add(file.bytes)
                .filter(|total| i64::try_from(*total).is_ok())
        });
        match total {
            Some(_) => Ok(()),
            None => Err(Error::invalid(
                path,
                "its files have too many bytes to count",
            )),
        }
    }

    /// Checks that every part is in a file and inside the tensor, and that its byte range, elements and checksums agree
    /// in size.
    fn check_parts(&self, tensor: &TensorEntry, item_bytes: usize) -> Result<(), String> {
        let mut files = HashSet::new();
        for part in &tensor.parts {
            let PartEntry { region, bytes, .. } = part;
            let file = self
                .files
                .get(part.file)
                .ok_or_else(|| format!("file {} does not exist", part.file))?;
            if !files.insert(part.file) {
                return Err(format!("it has two parts in file {:?}", file.name));
            }
            region
                .check(&tensor.shape)
                .map_err(|problem| format!("it has no {region}: {problem}"))?;
            // No overflow: the region is inside a tensor whose bytes fit a `usize`.
            let num_bytes = (region.len() * item_bytes) as u64;
            let is_inside = bytes.start >= file.header_bytes && bytes.end <= file.bytes;
            if !is_inside || bytes.end.checked_sub(bytes.start) != Some(num_bytes) {
                return Err(format!(
                    "{region} takes {num_bytes} bytes after byte {}, but has bytes {} to {} of {:?}, which has {}",
                    file.header_bytes, bytes.start, bytes.end, file.name, file.bytes
                ));
            }
            let num_chunks = num_bytes.div_ceil(self.chunk_bytes);
            if part.crc32.0.len() as u64 != num_chunks {
                return Err(format!(
                    "{region} has {} checksums for {num_chunks} chunks",
                    part.crc32.0.len()
                ));
            }
        }
        Ok(())
    }

    /// Checks that the parts in each file are consecutive, from the end of its header to the end of the file.
    fn validate_file_tiling(&self, path: &Path) -> Result<(), Error> {
        let mut parts: Vec<_> = self
            .tensors
            .iter()
            .flat_map(|tensor| tensor.parts.iter().map(move |part| (part, tensor)))
            .collect();
        parts.sort_by_key(|(part, _)| (part.file, part.bytes.start, part.bytes.end));
        let mut parts = parts.into_iter().peekable();
        for (index, file) in self.files.iter().enumerate() {
            let mut end = file.header_bytes;
            while let Some((part, tensor)) = parts.next_if(|(part, _)| part.file == index) {
                if part.bytes.start != end {
                    let problem = format!(
                        "its bytes in {:?} start at {} instead of {end}",
                        file.name, part.bytes.start
                    );
                    return Err(Error::invalid_tensor(path, &tensor.name, problem));
                }
                end = part.bytes.end;
            }
            if end != file.bytes {
                let problem = format!(
                    "the tensors in {:?} end at byte {end}, but it has {}",
                    file.name, file.bytes
                );
                return Err(Error::invalid(path, problem));
            }
        }
        Ok(())
    }
}

/// Returns true if a name ends in `.safetensors` and has no path separators or other special characters, so it cannot
/// lead out of the folder.
fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    name.len() <= 255
        && name.ends_with(".safetensors")
        && !name.starts_with('.')
        && name.chars().all(is_plain)
}

fn has_sound_sizes(file: &FileEntry) -> bool {
    i64::try_from(file.bytes).is_ok()
        && file.header_bytes >= LENGTH_BYTES
        && file.header_bytes <= file.bytes
}

/// Checks that the parts hold every element of the tensor exactly once.
fn check_tiling(tensor: &TensorEntry) -> Result<(), String> {
    let total = tensor.num_elements();
    let parts = &tensor.parts;
    if total == 0 {
        return match parts.as_slice() {
            [part] if part.region.is_empty() => Ok(()),
            _ => Err("it is empty and must have exactly one empty part".to_owned()),
        };
    }
    if let Some(part) = parts.iter().find(|part| part.region.is_empty()) {
        return Err(format!("its part {} is empty", part.region));
    }
    let mut ranges: Vec<_> = parts.iter().filter_map(|part| as_flat(part)).collect();
    match ranges.len() {
        0 => check_boxes(tensor, total),
        flat if flat == parts.len() => {
            ranges.sort_by_key(|range| range.start);
            let mut end = 0;
            for range in ranges {
                if range.start != end {
                    return Err(format!(
                        "its parts hold elements up to {end} and then from {}",
                        range.start
                    ));
                }
                end = range.end;
            }
            if end == total {
                Ok(())
            } else {
                Err(format!("its parts hold {end} of {total} elements"))
            }
        }
        _ => Err("its parts must be all ranges or all boxes".to_owned()),
    }
}

fn as_flat(part: &PartEntry) -> Option<&std::ops::Range<usize>> {
    match &part.region {
        Region::Flat(range) => Some(range),
        Region::Box { .. } => None,
    }
}

/// Checks that boxes tile a tensor: they do not overlap, and have as many elements as the tensor.
fn check_boxes(tensor: &TensorEntry, total: usize) -> Result<(), String> {
    let mut boxes: Vec<(&[usize], &[usize])> = tensor
        .parts
        .iter()
        .filter_map(|part| match &part.region {
            Region::Box { offsets, sizes } => Some((offsets.as_slice(), sizes.as_slice())),
            Region::Flat(_) => None,
        })
        .collect();
    if boxes.len() > MAX_BOXES {
        return Err(format!(
            "it has {} boxes, but at most {MAX_BOXES} are read",
            boxes.len()
        ));
    }
    let held = tensor.parts.iter().try_fold(0usize, |held, part| {
        held.checked_add(part.region.len())
            .filter(|held| *held <= total)
    });
    // Sweeps along the dim with the most cuts, where the fewest boxes must be compared.
    let num_cuts = |dim: &usize| {
        let cuts: HashSet<_> = boxes.iter().map(|(offsets, _)| offsets[*dim]).collect();
        cuts.len()
    };
    let sweep = (0..tensor.shape.len()).max_by_key(num_cuts).unwrap_or(0);
    boxes.sort_by_key(|(offsets, _)| offsets.get(sweep).copied());
    for (index, (offsets, sizes)) in boxes.iter().enumerate() {
        for (other_offsets, other_sizes) in &boxes[index + 1..] {
            let overlaps = |dim: usize| {
                offsets[dim] < other_offsets[dim] + other_sizes[dim]
                    && other_offsets[dim] < offsets[dim] + sizes[dim]
            };
            let is_beyond = offsets
                .get(sweep)
                .is_some_and(|offset| other_offsets[sweep] >= offset + sizes[sweep]);
            if is_beyond {
                break;
            }
            if (0..tensor.shape.len()).all(overlaps) {
                return Err(format!(
                    "its parts at {offsets:?} and {other_offsets:?} overlap"
                ));
            }
        }
    }
    match held {
        Some(held) if held == total => Ok(()),
        _ => Err(format!(
            "its boxes do not contain each of its {total} elements exactly once"
        )),
    }
}
