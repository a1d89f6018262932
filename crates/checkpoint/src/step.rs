//! Reading a step: any region of any tensor, with any number of ranks.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::read_plan::check_region;
use crate::storage::{FileSystem, ReadFile, Storage};
use crate::{Dtype, Error, Index, Limits, Region, TensorEntry};

mod files;
mod part;

use files::Files;
use part::{Chunk, PartReader, overlap};

/// Whether tensors are verified against their checksums when they are read.
///
/// The index, headers and file sizes are always checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verification {
    /// Reads whole chunks, and checks each before returning any of it. For each contiguous range, reads at most two
    /// chunks (of 1 MiB) more than requested.
    #[default]
    Chunks,
    /// Reads exactly the requested bytes, unchecked. Slow for regions of many short runs, such as shards of the last
    /// dim, because each run is a separate read.
    None,
}

/// A step, open for reading by any number of threads.
///
/// The files are untrusted: sizes are checked before memory is allocated, and every problem is an error that names the
/// file, and the tensor if only one is affected.
#[derive(Debug)]
pub struct Step {
    files: Files,
    verification: Verification,
    by_name: HashMap<String, usize>,
}

/// A tensor of a model, to compare with the tensors of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Name of the tensor.
    pub name: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<usize>,
    /// Element type; `None` accepts any type, for callers that convert.
    pub dtype: Option<Dtype>,
}

/// What to do about tensors that a step has and the model does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    /// Fails with [`Error::Unexpected`].
    Refuse,
    /// Skips the tensors.
    Ignore,
}

/// The progress of a verification, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Bytes verified, or skipped because their file is damaged.
    pub done: u64,
    /// Bytes of all files of the step.
    pub total: u64,
    /// The file being verified.
    pub file: &'a str,
}

impl Step {
    /// Opens the step in a folder of the file system: reads and validates its index.
    ///
    /// # Errors
    ///
    /// [`Error::NotACheckpoint`], [`Error::Checksum`], [`Error::Version`], [`Error::Invalid`],
    /// [`Error::Limit`] or [`Error::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        Self::open_in(Arc::new(FileSystem), path, Limits::default())
    }

    /// Opens the step in a folder of another storage, or with other limits.
    ///
    /// # Errors
    ///
    /// Same as [`open`](Self::open).
    pub fn open_in(
        storage: Arc<dyn Storage>,
        path: impl Into<PathBuf>,
        limits: Limits,
    ) -> Result<Self, Error> {
        let files = Files::open(storage, path.into(), limits)?;
        let names = files.index.tensors.iter().enumerate();
        let by_name = names.map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Self {
            files,
            verification: Verification::default(),
            by_name,
        })
    }

    /// Sets whether reads verify checksums.
    #[must_use]
    pub fn verification(mut self, verification: Verification) -> Self {
        self.verification = verification;
        self
    }

    /// Returns the folder of the step.
    pub fn path(&self) -> &Path {
        &self.files.path
    }

    /// Returns the index of the step.
    pub fn index(&self) -> &Index {
        &self.files.index
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.files.storage
    }

    /// Returns the tensor with this name.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`].
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, Error> {
        let index = self.by_name.get(name).ok_or_else(|| Error::Missing {
            path: self.files.path.clone(),
            names: vec![name.to_owned()],
        })?;
        Ok(&self.files.index.tensors[*index])
    }

    /// Compares the tensors of a model with the tensors of the step, before anything is loaded. Tensors of the step for
    /// which `is_wanted` returns false, such as optimizer state, need not be in the model.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] with all names that are not in the step, [`Error::Shape`], [`Error::Type`], or, with
    /// [`Extra::Refuse`], [`Error::Unexpected`] with all names that are not in the model.
    pub fn compare(
        &self,
        expected: &[ExpectedTensor],
        is_wanted: impl Fn(&TensorEntry) -> bool,
        extra: Extra,
    ) -> Result<(), Error> {
        let path = || self.files.path.clone();
        let is_missing = |tensor: &&ExpectedTensor| !self.by_name.contains_key(&tensor.name);
        let missing: Vec<_> = expected.iter().filter(is_missing).collect();
        if !missing.is_empty() {
            let names = missing.into_iter().map(|tensor| tensor.name.clone());
            return Err(Error::Missing {
                path: path(),
                names: names.collect(),
            });
        }
        for tensor in expected {
            let stored = self.tensor(&tensor.name)?;
            if stored.shape != tensor.shape {
                return Err(Error::Shape {
                    path: path(),
                    tensor: tensor.name.clone(),
                    expected: tensor.shape.clone(),
                    got: stored.shape.clone(),
                });
            }
            if let Some(dtype) = tensor.dtype
                && stored.dtype != dtype
            {
                return Err(Error::Type {
                    path: path(),
                    tensor: tensor.name.clone(),
                    expected: dtype,
                    got: stored.dtype,
                });
            }
        }
        if extra == Extra::Ignore {
            return Ok(());
        }
        let known: std::collections::HashSet<_> =
            expected.iter().map(|tensor| tensor.name.as_str()).collect();
        let stored = self
            .files
            .index
            .tensors
            .iter()
            .filter(|tensor| is_wanted(tensor));
        let names: Vec<_> = stored
            .filter(|tensor| !known.contains(tensor.name.as_str()))
            .map(|tensor| tensor.name.clone())
            .collect();
        if names.is_empty() {
            Ok(())
        } else {
            Err(Error::Unexpected {
                path: path(),
                names,
            })
        }
    }

    /// Reads elements of a tensor: little-endian, in row-major order of the region.
    ///
    /// # Errors
    ///
    /// Same as [`read_into`](Self::read_into). Memory is allocated only after the files that hold the region have been
    /// found complete.
    pub fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>, Error> {
        let tensor = self.tensor(name)?;
        check_region(tensor, region)?;
        for part in &tensor.parts {
            if overlap(part, tensor, region).next().is_some() {
                self.files.file(part.file)?;
            }
        }
        let mut bytes = vec![0; region.len() * tensor.item_bytes()];
        self.read_into(name, region, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads elements of a tensor into a buffer of exactly their size. Accesses only the files that hold them, and only
    /// the necessary bytes; see [`Verification`].
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], [`Error::Region`] or [`Error::Length`] for an invalid call; [`Error::Checksum`],
    /// [`Error::FileSize`], [`Error::Invalid`], [`Error::Limit`] or [`Error::Io`] for a file that is damaged or cannot
    /// be read. The content of the buffer is unspecified after an error.
    pub fn read_into(&self, name: &str, region: &Region, buffer: &mut [u8]) -> Result<(), Error> {
        let tensor = self.tensor(name)?;
        check_region(tensor, region)?;
        let expected = region.len() * tensor.item_bytes();
        if buffer.len() != expected {
            return Err(Error::Length {
                tensor: tensor.name.clone(),
                region: region.clone(),
                expected,
                got: buffer.len(),
            });
        }
        let mut chunk = Chunk::default();
        for part in &tensor.parts {
            let mut pieces = overlap(part, tensor, region).peekable();
            if pieces.peek().is_none() {
                continue;
            }
            let reader = PartReader {
                files: &self.files,
                file: self.files.file(part.file)?,
                tensor,
                part,
            };
            for piece in pieces {
                let item_bytes = tensor.item_bytes();
                let from = (piece.from * item_bytes) as u64;
                let to = piece.to * item_bytes;
                let buffer = &mut buffer[to..to + piece.len * item_bytes];
                match self.verification {
                    Verification::Chunks => reader.read_verified(from, buffer, &mut chunk)?,
                    Verification::None => reader.read(from, buffer)?,
                }
            }
            chunk.index = None;
        }
        Ok(())
    }

    /// Checks that every file exists and has the size in the index. Does not read tensors.
    ///
    /// # Errors
    ///
    /// [`Error::FileSize`] or [`Error::Io`].
    pub fn check_sizes(&self) -> Result<(), Error> {
        (0..self.files.index.files.len()).try_for_each(|file| self.files.open_file(file).map(drop))
    }

    /// Opens the files now, up to the maximum number of files kept open. They can then be read to the end even if a run
    /// removes the step meanwhile. This requires a file system that keeps open files alive.
    ///
    /// # Errors
    ///
    /// [`Error::FileSize`]; [`Error::Checksum`], [`Error::Invalid`] or [`Error::Limit`] for a header; [`Error::Io`].
    pub fn hold(&self) -> Result<(), Error> {
        let files = 0..self.files.index.files.len().min(files::MAX_OPEN_FILES);
        files
            .into_iter()
            .try_for_each(|file| self.files.file(file).map(drop))
    }

    /// Reads and verifies every byte of the step, up to the first damage.
    ///
    /// # Errors
    ///
    /// [`Error::Checksum`], [`Error::FileSize`], [`Error::Invalid`], [`Error::Limit`] or [`Error::Io`].
    pub fn verify(&self, progress: impl FnMut(Progress<'_>)) -> Result<(), Error> {
        match self.find_damage(true, progress).into_iter().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Reads every byte of the step and returns all damage. For each file, the damage is either a wrong size or header,
    /// or each damaged part once.
    pub fn damage(&self, progress: impl FnMut(Progress<'_>)) -> Vec<Error> {
        self.find_damage(false, progress)
    }

    fn find_damage(&self, only_first: bool, mut progress: impl FnMut(Progress<'_>)) -> Vec<Error> {
        let total = self.files.index.files.iter().map(|file| file.bytes).sum();
        let mut found = Vec::new();
        let mut passed = 0;
        for (number, entry) in self.files.index.files.iter().enumerate() {
            let mut tell = |in_file| {
                progress(Progress {
                    done: passed + in_file,
                    total,
                    file: &entry.name,
                });
            };
            match self.files.file(number) {
                Ok(file) => {
                    self.find_damaged_parts(number, file, only_first, &mut tell, &mut found)
                }
                Err(error) => found.push(error),
            }
            if only_first && !found.is_empty() {
                return found;
            }
            tell(entry.bytes);
            passed += entry.bytes;
        }
        found
    }

    fn find_damaged_parts(
        &self,
        number: usize,
        file: Arc<dyn ReadFile>,
        only_first: bool,
        tell: &mut impl FnMut(u64),
        found: &mut Vec<Error>,
    ) {
        let mut buffer = Vec::new();
        for (tensor, part) in &self.files.by_file[number] {
            let tensor = &self.files.index.tensors[*tensor];
            let part = &tensor.parts[*part];
            let file = Arc::clone(&file);
            let reader = PartReader {
                files: &self.files,
                file,
                tensor,
                part,
            };
            for (bytes, expected) in part.chunks(self.files.index.chunk_bytes) {
                tell(bytes.start);
                buffer.resize((bytes.end - bytes.start) as usize, 0);
                if let Err(error) = reader.read_chunk(bytes, expected, &mut buffer) {
                    found.push(error);
                    break;
                }
            }
            if only_first && !found.is_empty() {
                return;
            }
        }
    }
}
