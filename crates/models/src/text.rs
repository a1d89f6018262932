//! Text as bytes, a part of it held out.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{ByteRange, ModelError, TokenStream};

/// Number of tokens of byte-level text.
pub const BYTE_VOCAB: usize = 256;

/// The number of bytes of which one is held out for evaluation, at the end of the text.
const HELD_OUT_FRACTION: usize = 20;

/// An input and its target, on both sides of the split.
const MIN_PART_BYTES: usize = 2;

/// Text as bytes, the last 5 % of which are held out for evaluation.
///
/// Bytes need no tokenizer and no particular encoding.
#[derive(Clone, Debug)]
pub struct ByteText {
    training: ByteRange,
    held_out: ByteRange,
    num_files: usize,
    num_skipped: usize,
}

impl ByteText {
    /// Reads a file, or every file of a folder and its sub-folders, one after the other in the
    /// order of their paths.
    ///
    /// No more than `max_bytes` are read. In a folder, what cannot be read is
    /// skipped and [counted](Self::num_skipped), and symbolic links are not
    /// followed.
    ///
    /// # Errors
    ///
    /// If the path is not there, cannot be read, or holds less than 4 bytes.
    pub fn read(path: impl AsRef<Path>, max_bytes: usize) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let metadata = path.metadata().map_err(|source| file_error(path, source))?;
        let mut reader = Reader::new(max_bytes, None);
        if metadata.is_file() {
            reader
                .read_file(path)
                .map_err(|source| file_error(path, source))?;
        } else if metadata.is_dir() {
            reader
                .read_folder(path)
                .map_err(|source| file_error(path, source))?;
        } else {
            return Err(ModelError::NotText {
                path: path.to_owned(),
            });
        }
        reader.finish(path)
    }

    /// Reads the Rust sources of the crates that cargo has downloaded: real text that is already
    /// there wherever this program was built.
    ///
    /// # Errors
    ///
    /// If there are none.
    pub fn crate_sources(max_bytes: usize) -> Result<Self, ModelError> {
        let path = registry_sources();
        let mut reader = Reader::new(max_bytes, Some(OsStr::new("rs")));
        match reader.read_folder(&path) {
            Ok(()) if reader.num_files > 0 => reader.finish(&path),
            _ => Err(ModelError::NoCrateSources { path }),
        }
    }

    /// Returns the stream of the bytes to train on.
    #[must_use]
    pub fn training(&self) -> TokenStream {
        TokenStream::Bytes(self.training.clone())
    }

    /// Returns the stream of the bytes to evaluate on.
    #[must_use]
    pub fn held_out(&self) -> TokenStream {
        TokenStream::Bytes(self.held_out.clone())
    }

    /// Returns the number of bytes, held out or not.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.training.as_slice().len() + self.held_out.as_slice().len()
    }

    /// Returns the number of files that were read.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.num_files
    }

    /// Returns the number of files and folders that could not be read.
    #[must_use]
    pub fn num_skipped(&self) -> usize {
        self.num_skipped
    }
}

/// Returns the folder in which cargo keeps the sources of downloaded crates.
fn registry_sources() -> PathBuf {
    let home = env::var_os("CARGO_HOME")
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .unwrap_or_else(|| PathBuf::from(".cargo"));
    home.join("registry").join("src")
}

/// A reader that appends files until there is enough.
struct Reader<'a> {
    bytes: Vec<u8>,
    max_bytes: usize,
    extension: Option<&'a OsStr>,
    num_files: usize,
    num_skipped: usize,
}

impl<'a> Reader<'a> {
    fn new(max_bytes: usize, extension: Option<&'a OsStr>) -> Self {
        Self {
            bytes: Vec::new(),
            max_bytes,
            extension,
            num_files: 0,
            num_skipped: 0,
        }
    }

    fn read_file(&mut self, path: &Path) -> io::Result<()> {
        let old_len = self.bytes.len();
        let left = self.max_bytes - old_len;
        let result = File::open(path)?
            .take(left as u64)
            .read_to_end(&mut self.bytes);
        if result.is_err() {
            // Half a file would make the text depend on when it failed.
            self.bytes.truncate(old_len);
        }
        result?;
        self.num_files += 1;
        Ok(())
    }

    /// Reads a folder; only failing to list it is an error.
    fn read_folder(&mut self, path: &Path) -> io::Result<()> {
        let mut entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            if self.bytes.len() >= self.max_bytes {
                break;
            }
            if self.read_entry(&entry).is_err() {
                self.num_skipped += 1;
            }
        }
        Ok(())
    }

    fn read_entry(&mut self, entry: &fs::DirEntry) -> io::Result<()> {
        let (kind, path) = (entry.file_type()?, entry.path());
        if kind.is_dir() {
            self.read_folder(&path)
        } else if kind.is_file() && self.wants(&path) {
            self.read_file(&path)
        } else {
            Ok(())
        }
    }

    fn wants(&self, path: &Path) -> bool {
        self.extension
            .is_none_or(|extension| path.extension() == Some(extension))
    }

    /// Holds out the end of what was read from `path`.
    fn finish(self, path: &Path) -> Result<ByteText, ModelError> {
        let len = self.bytes.len();
        let bytes: Arc<[u8]> = self.bytes.into();
        let held_out_len = (len / HELD_OUT_FRACTION).max(MIN_PART_BYTES);
        let split = len.saturating_sub(held_out_len);
        let training = ByteRange::new(Arc::clone(&bytes), 0..split);
        let held_out = ByteRange::new(bytes, split..len);
        match (training, held_out) {
            (Some(training), Some(held_out)) if split >= MIN_PART_BYTES => Ok(ByteText {
                training,
                held_out,
                num_files: self.num_files,
                num_skipped: self.num_skipped,
            }),
            _ => Err(ModelError::TooLittleText {
                path: path.to_owned(),
                found: len,
                needed: 2 * MIN_PART_BYTES,
                num_skipped: self.num_skipped,
            }),
        }
    }
}

fn file_error(path: &Path, source: io::Error) -> ModelError {
    ModelError::File {
        path: path.to_owned(),
        source,
    }
}
