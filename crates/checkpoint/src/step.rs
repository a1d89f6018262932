//! A step that is read: any part of any tensor, at any world size.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crc32fast::Hasher;

use crate::checksum::{BLOCK_BYTES, crc32};
use crate::index::{INDEX_FILE, PartEntry, SEAL_FILE, seal};
use crate::read_plan::check_region;
use crate::region::{Overlap, Runs, overlaps};
use crate::shard_header::{self, LENGTH_BYTES};
use crate::storage::{FileSystem, ReadFile, Storage};
use crate::{Dtype, Error, Index, Limits, Region, TensorEntry};

/// At most this many files are kept open: a step may have more than a process may open.
const MAX_OPEN_FILES: usize = 64;

/// Whether tensors are checked against their checksums as they are read.
///
/// The index, the headers and the sizes of files are checked in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verification {
    /// Reads whole chunks and checks each before handing out any of it; at most two chunks (of 1 MiB)
    /// too many for each contiguous range.
    #[default]
    Chunks,
    /// Reads exactly the bytes asked for, unchecked. Slow for regions of many short runs, such as
    /// shards of the last dim: each is a read of its own.
    None,
}

/// A step, open for reading by any number of threads.
///
/// Nothing in the files is trusted: sizes are checked before memory is taken, and what is wrong is an
/// error that names file and tensor.
#[derive(Debug)]
pub struct Step {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    limits: Limits,
    verification: Verification,
    index: Index,
    by_name: HashMap<String, usize>,
    /// For each file the parts in it, `(tensor, part)`, in the order of their bytes.
    by_file: Vec<Vec<(usize, usize)>>,
    /// Set for files whose header was found to agree with the index.
    checked: Vec<OnceLock<()>>,
    /// The files used last.
    open_files: OpenFiles,
}

#[derive(Default)]
struct OpenFiles(Mutex<VecDeque<(usize, Arc<dyn ReadFile>)>>);

impl std::fmt::Debug for OpenFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpenFiles")
    }
}

/// A tensor that a model has, to be compared with those of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Its name.
    pub name: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<usize>,
    /// Its element type; any if `None`, for those who convert.
    pub dtype: Option<Dtype>,
}

/// What to do about tensors that a step has and the model lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    /// They are an error.
    Refuse,
    /// They are not looked at.
    Ignore,
}

/// How far a verification has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Bytes verified, or passed over because their file is damaged.
    pub done: u64,
    /// Bytes of all files.
    pub total: u64,
    /// The file at work.
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
    /// As [`open`](Self::open).
    pub fn open_in(
        storage: Arc<dyn Storage>,
        path: impl Into<PathBuf>,
        limits: Limits,
    ) -> Result<Self, Error> {
        let path = path.into();
        let index = read_index(&*storage, &path, &limits)?;
        let names = index.tensors.iter().enumerate();
        let by_name = names.map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        let mut by_file = vec![Vec::new(); index.files.len()];
        for (i, tensor) in index.tensors.iter().enumerate() {
            for (j, part) in tensor.parts.iter().enumerate() {
                by_file[part.file].push((i, j));
            }
        }
        for parts in &mut by_file {
            parts.sort_by_key(|(tensor, part)| {
                let bytes = &index.tensors[*tensor].parts[*part].bytes;
                (bytes.start, bytes.end)
            });
        }
        let mut checked = Vec::new();
        checked.resize_with(index.files.len(), OnceLock::new);
        Ok(Self {
            storage,
            path,
            limits,
            verification: Verification::default(),
            index,
            by_name,
            by_file,
            checked,
            open_files: OpenFiles::default(),
        })
    }

    /// Reads with or without checking checksums.
    #[must_use]
    pub fn with_verification(mut self, verification: Verification) -> Self {
        self.verification = verification;
        self
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in it.
    pub fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`].
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, Error> {
        let index = self.by_name.get(name).ok_or_else(|| Error::Missing {
            path: self.path.clone(),
            names: vec![name.to_owned()],
        })?;
        Ok(&self.index.tensors[*index])
    }

    /// Compares the tensors of a model with those of the step, before anything is loaded. Tensors
    /// of the step for which `is_wanted` is false are left out of it, such as optimizer state.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] with all names that the step lacks, [`Error::Shape`], [`Error::Type`], or
    /// [`Error::Unexpected`] with all that the model lacks.
    pub fn compare(
        &self,
        expected: &[ExpectedTensor],
        is_wanted: impl Fn(&TensorEntry) -> bool,
        extra: Extra,
    ) -> Result<(), Error> {
        let path = || self.path.clone();
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
        let stored = self.index.tensors.iter().filter(|tensor| is_wanted(tensor));
        let names: Vec<_> = stored
            .filter(|tensor| !known.contains(tensor.name.as_str()))
            .map(|tensor| tensor.name.clone())
            .collect();
        match names.is_empty() {
            true => Ok(()),
            false => Err(Error::Unexpected {
                path: path(),
                names,
            }),
        }
    }

    /// Reads elements of a tensor: little-endian, in row-major order of the region.
    ///
    /// # Errors
    ///
    /// As [`read_into`](Self::read_into). No memory is taken before the files that hold the region are
    /// known to be there in full.
    pub fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>, Error> {
        let tensor = self.tensor(name)?;
        check_region(tensor, region)?;
        for part in &tensor.parts {
            if overlap(part, tensor, region).next().is_some() {
                self.file(part.file)?;
            }
        }
        let mut bytes = vec![0; region.len() * tensor.item_bytes()];
        self.read_into(name, region, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads elements of a tensor into a buffer of exactly their size, touching only the files and
    /// bytes that hold them; see [`Verification`].
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], [`Error::Region`] or [`Error::Length`] for a wrong call;
    /// [`Error::Checksum`], [`Error::FileSize`], [`Error::Invalid`] or [`Error::Io`] for damage. The
    /// buffer's content is of no use then.
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
                step: self,
                file: self.file(part.file)?,
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

    /// Whether every file is there and has its size. Reads no tensors.
    ///
    /// # Errors
    ///
    /// [`Error::FileSize`] or [`Error::Io`].
    pub fn check_sizes(&self) -> Result<(), Error> {
        (0..self.index.files.len()).try_for_each(|file| self.open_file(file).map(drop))
    }

    /// Reads every byte of the step and checks it, up to the first damage.
    ///
    /// # Errors
    ///
    /// [`Error::Checksum`], [`Error::FileSize`], [`Error::Invalid`] or [`Error::Io`].
    pub fn verify(&self, progress: impl FnMut(Progress<'_>)) -> Result<(), Error> {
        match self.find_damage(true, progress).into_iter().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Reads every byte of the step and tells all that is damaged: of each file its size or its header,
    /// else each damaged part once.
    pub fn damage(&self, progress: impl FnMut(Progress<'_>)) -> Vec<Error> {
        self.find_damage(false, progress)
    }

    fn find_damage(&self, only_first: bool, mut progress: impl FnMut(Progress<'_>)) -> Vec<Error> {
        let total = self.index.files.iter().map(|file| file.bytes).sum();
        let mut found = Vec::new();
        let mut passed = 0;
        for (number, entry) in self.index.files.iter().enumerate() {
            let mut tell = |in_file| {
                progress(Progress {
                    done: passed + in_file,
                    total,
                    file: &entry.name,
                });
            };
            match self.file(number) {
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
        for (tensor, part) in &self.by_file[number] {
            let tensor = &self.index.tensors[*tensor];
            let part = &tensor.parts[*part];
            let file = Arc::clone(&file);
            let step = self;
            let reader = PartReader {
                step,
                file,
                tensor,
                part,
            };
            for (bytes, expected) in part.chunks(self.index.chunk_bytes) {
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

    fn file_path(&self, number: usize) -> PathBuf {
        self.path.join(&self.index.files[number].name)
    }

    /// A file whose size and header agree with the index.
    fn file(&self, number: usize) -> Result<Arc<dyn ReadFile>, Error> {
        let lock = || {
            self.open_files
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let known = lock()
            .iter()
            .find(|(known, _)| *known == number)
            .map(|(_, file)| Arc::clone(file));
        let file = match known {
            Some(file) => file,
            None => {
                let file = self.open_file(number)?;
                let mut files = lock();
                files.push_back((number, Arc::clone(&file)));
                if files.len() > MAX_OPEN_FILES {
                    files.pop_front();
                }
                file
            }
        };
        if self.checked[number].get().is_none() {
            self.check_header(number, &*file)?;
            self.checked[number].get_or_init(|| ());
        }
        Ok(file)
    }

    /// A file that has its size.
    fn open_file(&self, number: usize) -> Result<Arc<dyn ReadFile>, Error> {
        let path = self.file_path(number);
        let file = self.storage.open_file(&path);
        let file = file.map_err(Error::io("open", &path))?;
        let got = file.num_bytes().map_err(Error::io("open", &path))?;
        let expected = self.index.files[number].bytes;
        if got == expected {
            return Ok(Arc::from(file));
        }
        let parts = self.by_file[number].iter();
        let is_cut = |(tensor, part): &&(usize, usize)| {
            self.index.tensors[*tensor].parts[*part].bytes.end > got
        };
        let cut = parts.clone().find(is_cut);
        Err(Error::FileSize {
            path,
            tensor: cut.map(|(tensor, _)| self.index.tensors[*tensor].name.clone()),
            expected,
            got,
        })
    }

    fn check_header(&self, number: usize, file: &dyn ReadFile) -> Result<(), Error> {
        let path = self.file_path(number);
        let entry = &self.index.files[number];
        if entry.header_bytes > self.limits.header_bytes {
            return Err(Error::Limit {
                path,
                what: "the header",
                limit: self.limits.header_bytes,
                got: entry.header_bytes,
            });
        }
        let mut bytes = vec![0; entry.header_bytes as usize];
        let read = file.read_exact_at(&mut bytes, 0);
        read.map_err(Error::io("read", &path))?;
        let got = crc32(&bytes);
        if got != entry.header_crc32 {
            return Err(Error::Checksum {
                path,
                tensor: None,
                bytes: 0..entry.header_bytes,
                expected: entry.header_crc32,
                got,
            });
        }
        let length = bytes
            .first_chunk()
            .map(|length| u64::from_le_bytes(*length));
        if length != Some(entry.header_bytes - LENGTH_BYTES) {
            let problem = format!("its header should have {} bytes", entry.header_bytes);
            return Err(Error::invalid(&path, problem));
        }
        let header = shard_header::decode(&path, &bytes, entry.bytes)?;
        let parts = &self.by_file[number];
        let num_tensors = header.tensors().len();
        if num_tensors != parts.len() {
            let problem = format!(
                "it has {num_tensors} tensors, but {} according to the index",
                parts.len()
            );
            return Err(Error::invalid(&path, problem));
        }
        for (tensor, part) in parts {
            let tensor = &self.index.tensors[*tensor];
            let part = &tensor.parts[*part];
            let offset = |byte: u64| (byte - entry.header_bytes) as usize;
            let is_same = header.info(&tensor.name).is_some_and(|info| {
                info.dtype == tensor.dtype
                    && info.shape == part.region.stored_shape(&tensor.shape)
                    && info.data_offsets == (offset(part.bytes.start), offset(part.bytes.end))
            });
            if !is_same {
                let problem = "its header and the index disagree about it";
                return Err(Error::invalid_tensor(&path, &tensor.name, problem));
            }
        }
        Ok(())
    }
}

/// The chunk read last, of which a later piece may need more.
#[derive(Default)]
struct Chunk {
    index: Option<usize>,
    bytes: Vec<u8>,
}

/// Reads the bytes of one part.
struct PartReader<'a> {
    step: &'a Step,
    file: Arc<dyn ReadFile>,
    tensor: &'a TensorEntry,
    part: &'a PartEntry,
}

impl PartReader<'_> {
    /// Fills the buffer from byte `from` of the part on.
    fn read(&self, from: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let read = self
            .file
            .read_exact_at(buffer, self.part.bytes.start + from);
        read.map_err(|source| Error::Io {
            operation: "read",
            path: self.step.file_path(self.part.file),
            source,
        })
    }

    /// As [`read`](Self::read), by way of whole chunks that are checked.
    ///
    /// A chunk that is wanted in full goes straight into the buffer.
    fn read_verified(
        &self,
        from: u64,
        mut buffer: &mut [u8],
        chunk: &mut Chunk,
    ) -> Result<(), Error> {
        let chunk_bytes = self.step.index.chunk_bytes;
        let part_bytes = self.part.bytes.end - self.part.bytes.start;
        let mut from = from;
        while !buffer.is_empty() {
            let index = (from / chunk_bytes) as usize;
            let start = index as u64 * chunk_bytes;
            let end = (start + chunk_bytes).min(part_bytes);
            let len = buffer.len().min((end - from) as usize);
            let (now, later) = std::mem::take(&mut buffer).split_at_mut(len);
            let in_file = self.part.bytes.start + start..self.part.bytes.start + end;
            // Validation established that there is a checksum for every chunk.
            let expected = self.part.crc32.0[index];
            if len as u64 == end - start {
                self.read_chunk(in_file, expected, now)?;
            } else {
                if chunk.index != Some(index) {
                    chunk.index = None;
                    chunk.bytes.resize((end - start) as usize, 0);
                    self.read_chunk(in_file, expected, &mut chunk.bytes)?;
                    chunk.index = Some(index);
                }
                let offset = (from - start) as usize;
                now.copy_from_slice(&chunk.bytes[offset..offset + len]);
            }
            from += len as u64;
            buffer = later;
        }
        Ok(())
    }

    fn read_chunk(&self, bytes: Range<u64>, expected: u32, buffer: &mut [u8]) -> Result<(), Error> {
        let mut from = bytes.start - self.part.bytes.start;
        let mut hasher = Hasher::new();
        for block in buffer.chunks_mut(BLOCK_BYTES) {
            self.read(from, block)?;
            hasher.update(block);
            from += block.len() as u64;
        }
        let got = hasher.finalize();
        if got == expected {
            return Ok(());
        }
        Err(Error::Checksum {
            path: self.step.file_path(self.part.file),
            tensor: Some(self.tensor.name.clone()),
            bytes,
            expected,
            got,
        })
    }
}

fn overlap(
    part: &PartEntry,
    tensor: &TensorEntry,
    region: &Region,
) -> impl Iterator<Item = Overlap> {
    let from = Runs::new(&part.region, &tensor.shape);
    overlaps(from, Runs::new(region, &tensor.shape))
}

fn read_index(storage: &dyn Storage, path: &Path, limits: &Limits) -> Result<Index, Error> {
    let seal_path = path.join(SEAL_FILE);
    let index_path = path.join(INDEX_FILE);
    for (file, name) in [(&index_path, INDEX_FILE), (&seal_path, SEAL_FILE)] {
        let exists = storage.exists(file);
        if !exists.map_err(Error::io("look for", file))? {
            return Err(Error::NotACheckpoint {
                path: path.to_owned(),
                missing: name.to_owned(),
            });
        }
    }
    // More than any seal has.
    const MAX_SEAL_BYTES: u64 = 64;
    let found = read_whole(
        storage,
        &seal_path,
        "the checksum of the index",
        MAX_SEAL_BYTES,
    )?;
    let json = read_whole(storage, &index_path, "the index", limits.index_bytes)?;
    if found != seal(&json).as_bytes() {
        let problem = format!(
            "its checksum and length are not those in {SEAL_FILE}: one of the two files was changed"
        );
        return Err(Error::invalid(&index_path, problem));
    }
    Index::from_json(&index_path, &json)
}

fn read_whole(
    storage: &dyn Storage,
    path: &Path,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, Error> {
    let file = storage.open_file(path).map_err(Error::io("open", path))?;
    let got = file.num_bytes().map_err(Error::io("open", path))?;
    if got > limit {
        return Err(Error::Limit {
            path: path.to_owned(),
            what,
            limit,
            got,
        });
    }
    let mut bytes = vec![0; got as usize];
    let read = file.read_exact_at(&mut bytes, 0);
    read.map_err(Error::io("read", path))?;
    Ok(bytes)
}
