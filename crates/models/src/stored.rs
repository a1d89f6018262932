//! A tensor of a model in a file: where it lies, and how some of its elements are read.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use half::{bf16, f16};

use crate::ParameterSpec;

/// An element type of floats in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredType {
    F32,
    F16,
    BF16,
}

impl StoredType {
    /// Returns the type of this name, if it is one of those that are read.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::BF16),
            _ => None,
        }
    }

    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Returns an element of a file, whose bytes are in the order of x86.
    fn value(self, bytes: &[u8]) -> f32 {
        let two = || [bytes[0], bytes[1]];
        match self {
            Self::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Self::F16 => f16::from_le_bytes(two()).to_f32(),
            Self::BF16 => bf16::from_le_bytes(two()).to_f32(),
        }
    }
}

/// A file as it was when its header was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenedFile {
    path: PathBuf,
    num_bytes: u64,
    modified: Option<SystemTime>,
}

impl OpenedFile {
    /// Describes the file at `path` as it is now.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let metadata = path.metadata()?;
        Ok(Self {
            path: path.to_owned(),
            num_bytes: metadata.len(),
            modified: metadata.modified().ok(),
        })
    }

    /// Opens it again, if it is still what it was.
    fn reopen(&self) -> io::Result<File> {
        match Self::of(&self.path)? == *self {
            true => File::open(&self.path),
            false => Err(io::Error::other("the file has changed since it was opened")),
        }
    }
}

/// A tensor in a file.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    pub(crate) file: OpenedFile,
    /// Position of its first byte.
    pub(crate) start: u64,
    pub(crate) dtype: StoredType,
    pub(crate) spec: ParameterSpec,
}

/// Elements that were read, and the bytes that this took.
pub(crate) struct Elements {
    pub(crate) values: Vec<f32>,
    pub(crate) num_bytes: u64,
}

impl StoredTensor {
    /// Returns the number of its elements.
    pub(crate) fn num_elements(&self) -> usize {
        self.spec.shape.iter().product()
    }

    /// Reads elements of the module's parameter, by their place in it, in row-major order. Of a transposed matrix these are in
    /// a part of each row of the file, and nothing else is read.
    pub(crate) fn read(&self, range: Range<usize>) -> io::Result<Elements> {
        let mut file = self.file.reopen()?;
        if range.is_empty() {
            return Ok(Elements {
                values: Vec::new(),
                num_bytes: 0,
            });
        }
        match (self.spec.is_transposed, &self.spec.shape[..]) {
            (true, &[rows, columns]) => self.read_transposed(&mut file, range, rows, columns),
            _ => {
                let bytes = self.bytes(&mut file, range)?;
                Ok(Elements {
                    values: self.values(&bytes).collect(),
                    num_bytes: bytes.len() as u64,
                })
            }
        }
    }

    /// Reads elements of a matrix that has `rows` rows of `columns` in the file, and is the other way round in the module.
    fn read_transposed(
        &self,
        file: &mut File,
        range: Range<usize>,
        rows: usize,
        columns: usize,
    ) -> io::Result<Elements> {
        // The rows of the module are columns of the file.
        let (first, last) = (range.start / rows, (range.end - 1) / rows);
        let width = last + 1 - first;
        let mut values = vec![0.0; range.len()];
        let mut num_bytes = 0;
        for row in 0..rows {
            let start = row * columns + first;
            let bytes = self.bytes(file, start..start + width)?;
            num_bytes += bytes.len() as u64;
            for (column, value) in self.values(&bytes).enumerate() {
                let place = (first + column) * rows + row;
                if range.contains(&place) {
                    values[place - range.start] = value;
                }
            }
        }
        Ok(Elements { values, num_bytes })
    }

    /// Reads elements by their place in the file.
    fn bytes(&self, file: &mut File, range: Range<usize>) -> io::Result<Vec<u8>> {
        let size = self.dtype.size();
        let mut bytes = vec![0; range.len() * size];
        file.seek(SeekFrom::Start(self.start + (range.start * size) as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn values(&self, bytes: &[u8]) -> impl Iterator<Item = f32> {
        let dtype = self.dtype;
        let elements = bytes.chunks_exact(dtype.size());
        elements.map(move |element| dtype.value(element))
    }
}
