//! The files of a step: opened, compared with the index, and kept open.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::checksum::crc32;
use crate::index::{INDEX_FILE, SEAL_FILE, seal};
use crate::shard_header::{self, LENGTH_BYTES};
use crate::storage::{ReadFile, Storage};
use crate::{Error, Index, Limits};

/// Maximum number of files that are kept open. A step may have more files than a process may open.
pub(super) const MAX_OPEN_FILES: usize = 64;

/// The most recently used files, kept open.
#[derive(Default)]
struct OpenFiles(Mutex<VecDeque<(usize, Arc<dyn ReadFile>)>>);

impl std::fmt::Debug for OpenFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpenFiles")
    }
}

/// The files of a step, and their descriptions in the index.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) storage: Arc<dyn Storage>,
    /// The folder of the step.
    pub(super) path: PathBuf,
    pub(super) limits: Limits,
    pub(super) index: Index,
    /// The parts in each file as `(tensor, part)`, in the order of their positions.
    pub(super) by_file: Vec<Vec<(usize, usize)>>,
    /// Set for each file whose header has been found to match the index.
    checked: Vec<OnceLock<()>>,
    /// The files that stay open.
    open_files: OpenFiles,
}

impl Files {
    /// Reads and validates the index of a step.
    pub(super) fn open(
        storage: Arc<dyn Storage>,
        path: PathBuf,
        limits: Limits,
    ) -> Result<Self, Error> {
        let index = read_index(&*storage, &path, &limits)?;
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
            index,
            by_file,
            checked,
            open_files: OpenFiles::default(),
        })
    }

    pub(super) fn file_path(&self, number: usize) -> PathBuf {
        self.path.join(&self.index.files[number].name)
    }

    /// Returns a file whose size and header match the index, opening it if necessary.
    pub(super) fn file(&self, number: usize) -> Result<Arc<dyn ReadFile>, Error> {
        let lock = || self.open_files.0.lock();
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

    /// Opens a file and checks its size.
    pub(super) fn open_file(&self, number: usize) -> Result<Arc<dyn ReadFile>, Error> {
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
                let problem = "the header and the index describe it differently";
                return Err(Error::invalid_tensor(&path, &tensor.name, problem));
            }
        }
        Ok(())
    }
}

/// Reads the index of a step, and checks its seal and its content.
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
    // Larger than any seal.
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
            "its checksum and length do not match {SEAL_FILE}: one of the two files was changed"
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
