//! A plan of the bytes to read for a rank's regions of tensors. Creating it reads nothing.

use std::ops::Range;

use crate::overlap::{Runs, overlaps};
use crate::{Error, Index, Region, TensorEntry};

/// Exactly the bytes of a step's files that hold one rank's regions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadPlan {
    /// The ranges, by file and then by start. None is empty, and no two ranges of one file touch.
    pub reads: Vec<FileRange>,
}

/// A range of bytes in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    /// Index of the file in [`Index::files`].
    pub file: usize,
    /// The range of bytes in that file.
    pub bytes: Range<u64>,
}

impl ReadPlan {
    /// Plans the reads of these regions of a step's tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for a name that is not in the index, [`Error::Region`] for elements that are not in the
    /// tensor.
    pub fn new<'a>(
        index: &Index,
        wanted: impl IntoIterator<Item = (&'a str, &'a Region)>,
    ) -> Result<Self, Error> {
        let by_name: std::collections::HashMap<_, _> = index
            .tensors
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect();
        let mut reads = Vec::new();
        for (name, region) in wanted {
            let tensor = by_name.get(name).ok_or_else(|| Error::Argument {
                argument: "name",
                expected: "a tensor of the checkpoint".to_owned(),
                got: format!("{name:?}"),
            })?;
            check_region(tensor, region)?;
            let item_bytes = tensor.item_bytes() as u64;
            for part in &tensor.parts {
                let from = Runs::new(&part.region, &tensor.shape);
                let to = Runs::new(region, &tensor.shape);
                reads.extend(overlaps(from, to).map(|piece| {
                    let start = part.bytes.start + piece.from as u64 * item_bytes;
                    FileRange {
                        file: part.file,
                        bytes: start..start + piece.len as u64 * item_bytes,
                    }
                }));
            }
        }
        reads.sort_by_key(|read| (read.file, read.bytes.start, read.bytes.end));
        let mut merged: Vec<FileRange> = Vec::new();
        for read in reads {
            match merged.last_mut() {
                Some(last) if last.file == read.file && last.bytes.end >= read.bytes.start => {
                    last.bytes.end = last.bytes.end.max(read.bytes.end);
                }
                _ => merged.push(read),
            }
        }
        Ok(Self { reads: merged })
    }

    /// Returns the number of bytes to read.
    pub fn num_bytes(&self) -> u64 {
        let reads = self.reads.iter();
        reads.map(|read| read.bytes.end - read.bytes.start).sum()
    }
}

pub(crate) fn check_region(tensor: &TensorEntry, region: &Region) -> Result<(), Error> {
    region
        .check(&tensor.shape)
        .map_err(|problem| Error::Region {
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            region: region.clone(),
            problem,
        })
}
