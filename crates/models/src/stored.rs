//! A tensor of a model in a file: its position, and how parts of it are read.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use half::{bf16, f16};

use crate::ParameterSpec;

/// A float type in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredType {
    F32,
    F16,
    BF16,
}

impl StoredType {
    /// Returns the type with this name, if it is supported.
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

    /// Decodes an element from its little-endian bytes.
    fn value(self, bytes: &[u8]) -> f32 {
        let two = || [bytes[0], bytes[1]];
        match self {
            Self::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Self::F16 => f16::from_le_bytes(two()).to_f32(),
            Self::BF16 => bf16::from_le_bytes(two()).to_f32(),
        }
    }
}

/// The path, size and modification time of a file when its header was read, to detect changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenedFile {
    path: PathBuf,
    num_bytes: u64,
    modified: Option<SystemTime>,
}

impl OpenedFile {
    /// Returns the current state of the file at `path`.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let metadata = path.metadata()?;
        Ok(Self {
            path: path.to_owned(),
            num_bytes: metadata.len(),
            modified: metadata.modified().ok(),
        })
    }

    /// Opens the file again, if it has not changed.
    fn reopen(&self) -> io::Result<File> {
        if Self::of(&self.path)? == *self {
            File::open(&self.path)
        } else {
            Err(io::Error::other("the file has changed since it was opened"))
        }
    }
}

/// A tensor in a file.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    pub(crate) file: OpenedFile,
    /// Position of the tensor's first byte.
    pub(crate) start: u64,
    pub(crate) dtype: StoredType,
    pub(crate) spec: ParameterSpec,
}

/// Elements that were read, and the traffic of reading them.
pub(crate) struct Elements {
    pub(crate) values: Vec<f32>,
    pub(crate) traffic: Traffic,
}

/// Counts of requests and bytes.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) num_requests: u64,
    pub(crate) num_bytes: u64,
    /// Bytes of the requested elements. In a transposed matrix, the module's first and last row count in full.
    pub(crate) num_bytes_taken: u64,
}

/// Maximum number of bytes per request, unless one piece of a row is larger.
const REQUEST_BYTES: usize = 1 << 20;

/// Maximum number of bytes between two pieces of rows that are read with one request. Another request takes about as
/// long as reading this many bytes: some 100 KiB on a fast disk, and more on a network file system.
const GAP_BYTES: usize = 256 << 10;

impl StoredTensor {
    /// Returns the number of elements.
    pub(crate) fn num_elements(&self) -> usize {
        self.spec.shape.iter().product()
    }

    /// Reads a range of the elements in the file's order.
    pub(crate) fn read_in_file_order(&self, range: Range<usize>) -> io::Result<Elements> {
        let (mut elements, mut file) = self.begin(&range)?;
        file.read_in_order(&mut elements, range)?;
        Ok(elements)
    }

    /// Returns room for the elements of a range, and a reader.
    fn begin(&self, range: &Range<usize>) -> io::Result<(Elements, Requests<'_>)> {
        let elements = Elements {
            values: vec![0.0; range.len()],
            traffic: Traffic::default(),
        };
        let file = Requests {
            file: self.file.reopen()?,
            tensor: self,
            bytes: Vec::new(),
        };
        Ok((elements, file))
    }

    /// Reads a range of the elements of the module's parameter, in the module's row-major order.
    pub(crate) fn read(&self, range: Range<usize>) -> io::Result<Elements> {
        let (mut elements, mut file) = self.begin(&range)?;
        if range.is_empty() {
            return Ok(elements);
        }
        match (self.spec.is_transposed, &self.spec.shape[..]) {
            (true, &[rows, columns]) => {
                file.read_transposed(&mut elements, range, rows, columns)?
            }
            _ => file.read_in_order(&mut elements, range)?,
        }
        Ok(elements)
    }
}

/// A reader of one tensor's bytes.
struct Requests<'a> {
    file: File,
    tensor: &'a StoredTensor,
    /// The bytes of the last request.
    bytes: Vec<u8>,
}

impl Requests<'_> {
    /// Reads elements that have the same order in the file and in the module.
    fn read_in_order(&mut self, elements: &mut Elements, range: Range<usize>) -> io::Result<()> {
        let dtype = self.tensor.dtype;
        let at_once = REQUEST_BYTES / dtype.size();
        let Elements { values, traffic } = elements;
        for (values, start) in values
            .chunks_mut(at_once)
            .zip((range.start..).step_by(at_once))
        {
            self.ask(start..start + values.len(), traffic)?;
            for (value, bytes) in values.iter_mut().zip(self.bytes.chunks_exact(dtype.size())) {
                *value = dtype.value(bytes);
            }
            traffic.num_bytes_taken += self.bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads elements of a matrix that has `rows` rows of `columns` in the file and is transposed in the module.
    ///
    /// The range covers a piece of each row in the file. Many rows are read at once, from the first row's piece to the
    /// last row's piece, unless the pieces are far apart.
    fn read_transposed(
        &mut self,
        elements: &mut Elements,
        range: Range<usize>,
        rows: usize,
        columns: usize,
    ) -> io::Result<()> {
        let dtype = self.tensor.dtype;
        let size = dtype.size();
        // The rows of the module are columns of the file.
        let (first, last) = (range.start / rows, (range.end - 1) / rows);
        let width = last + 1 - first;
        let rows_at_once = if (columns - width) * size <= GAP_BYTES {
            (REQUEST_BYTES / (columns * size)).max(1)
        } else {
            1
        };
        let Elements { values, traffic } = elements;
        for start in (0..rows).step_by(rows_at_once) {
            let end = (start + rows_at_once).min(rows);
            let asked = start * columns + first..(end - 1) * columns + first + width;
            self.ask(asked, traffic)?;
            traffic.num_bytes_taken += ((end - start) * width * size) as u64;
            for column in 0..width {
                let base = (first + column) * rows;
                let places = (base + start).max(range.start)..(base + end).min(range.end);
                for place in places {
                    let element = (place - base - start) * columns + column;
                    let bytes = &self.bytes[element * size..][..size];
                    values[place - range.start] = dtype.value(bytes);
                }
            }
        }
        Ok(())
    }

    /// Reads elements into `bytes`, by their position in the file's tensor.
    fn ask(&mut self, range: Range<usize>, traffic: &mut Traffic) -> io::Result<()> {
        let size = self.tensor.dtype.size();
        self.bytes.resize(range.len() * size, 0);
        let start = self.tensor.start + (range.start * size) as u64;
        self.file.seek(SeekFrom::Start(start))?;
        self.file.read_exact(&mut self.bytes)?;
        traffic.num_requests += 1;
        traffic.num_bytes += self.bytes.len() as u64;
        Ok(())
    }
}
