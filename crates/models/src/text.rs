//! Text as bytes, a part of it held out.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{ModelError, TokenRange, TokenStream};

/// Number of tokens of byte-level text.
pub const BYTE_VOCAB: usize = 256;

/// The number of bytes, or of files, of which one is held out for evaluation.
const HELD_OUT_FRACTION: usize = 20;

/// The crates whose sources are the text of [`ByteText::crate_sources`]: wherever this crate was built, cargo has these versions.
const CRATES: [&str; 11] = [
    "burn-autodiff-0.22.1",
    "burn-backend-0.22.1",
    "burn-core-0.22.1",
    "burn-dispatch-0.22.1",
    "burn-flex-0.22.1",
    "burn-ir-0.22.1",
    "burn-nn-0.22.1",
    "burn-optim-0.22.1",
    "burn-std-0.22.1",
    "burn-store-0.22.1",
    "burn-tensor-0.22.1",
];

/// An input and its target, on both sides of the split.
const MIN_PART_BYTES: usize = 2;

/// Text as bytes, a twentieth of which is held out for evaluation: the end of what was [read](Self::read), every 20th
/// file of [crates](Self::crate_sources).
///
/// Bytes need no tokenizer and no particular encoding.
#[derive(Clone, Debug)]
pub struct ByteText {
    training: TokenRange,
    held_out: TokenRange,
    num_files: usize,
    num_held_out: usize,
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

    /// Reads the Rust sources of Burn's crates, in the order of their names: real text of one hand that is already there
    /// wherever this program was built, and the same everywhere.
    ///
    /// # Errors
    ///
    /// If cargo has not all of them.
    pub fn crate_sources() -> Result<Self, ModelError> {
        let path = registry_sources();
        let registries = || fs::read_dir(&path).into_iter().flatten().flatten();
        let mut reader = Reader::new(usize::MAX, Some(OsStr::new("rs")));
        for name in CRATES {
            let found = registries().map(|registry| registry.path().join(name).join("src"));
            let found = found.filter(|sources| sources.is_dir()).min();
            let read = found.map(|sources| reader.read_folder(&sources));
            if !matches!(read, Some(Ok(()))) || reader.num_skipped > 0 {
                let path = path.join("*").join(name);
                return Err(ModelError::NoCrateSources { path });
            }
        }
        let text = reader.with_files_apart();
        text.ok_or(ModelError::NoCrateSources { path })
    }

    /// Returns the stream of the bytes to train on.
    #[must_use]
    pub fn training(&self) -> TokenStream {
        TokenStream::Text(self.training.clone())
    }

    /// Returns the stream of the bytes to evaluate on.
    #[must_use]
    pub fn held_out(&self) -> TokenStream {
        TokenStream::Text(self.held_out.clone())
    }

    /// Returns the number of bytes, held out or not.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.training.num_tokens() + self.held_out.num_tokens()
    }

    /// Returns the bytes to train on, and those to evaluate on.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.training, &self.held_out].map(|part| part.as_bytes().unwrap_or_default())
    }

    /// Returns the number of files that were read.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.num_files
    }

    /// Returns the number of files that are held out as a whole.
    #[must_use]
    pub fn num_held_out(&self) -> usize {
        self.num_held_out
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
    /// Where each file ends.
    ends: Vec<usize>,
    num_skipped: usize,
}

impl<'a> Reader<'a> {
    fn new(max_bytes: usize, extension: Option<&'a OsStr>) -> Self {
        Self {
            bytes: Vec::new(),
            max_bytes,
            extension,
            ends: Vec::new(),
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
        self.ends.push(self.bytes.len());
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

    /// Holds out every 20th file, counted from the middle of the first ones; `None` if there are too few.
    fn with_files_apart(self) -> Option<ByteText> {
        let mut parts = [Vec::new(), Vec::new()];
        let mut num_held_out = 0;
        let mut start = 0;
        for (index, &end) in self.ends.iter().enumerate() {
            let is_held_out = index % HELD_OUT_FRACTION == HELD_OUT_FRACTION / 2;
            num_held_out += usize::from(is_held_out);
            parts[usize::from(is_held_out)].extend(&self.bytes[start..end]);
            start = end;
        }
        let part = |bytes: Vec<u8>| {
            let range = 0..bytes.len();
            TokenRange::of_bytes(bytes.into(), range)
        };
        let [training, held_out] = parts;
        Some(ByteText {
            training: part(training)?,
            held_out: part(held_out)?,
            num_files: self.ends.len(),
            num_held_out,
            num_skipped: self.num_skipped,
        })
    }

    /// Holds out the end of what was read from `path`.
    fn finish(self, path: &Path) -> Result<ByteText, ModelError> {
        let len = self.bytes.len();
        let bytes: Arc<[u8]> = self.bytes.into();
        let held_out_len = (len / HELD_OUT_FRACTION).max(MIN_PART_BYTES);
        let split = len.saturating_sub(held_out_len);
        let training = TokenRange::of_bytes(Arc::clone(&bytes), 0..split);
        let held_out = TokenRange::of_bytes(bytes, split..len);
        match (training, held_out) {
            (Some(training), Some(held_out)) if split >= MIN_PART_BYTES => Ok(ByteText {
                training,
                held_out,
                num_files: self.ends.len(),
                num_held_out: 0,
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
