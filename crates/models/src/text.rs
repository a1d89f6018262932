//! Text as bytes, with a held-out part.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::remark::{Remark, Remarks};
use crate::text_reader::{Reader, Unread};
use crate::{ModelError, TokenRange, TokenStream};

/// Vocabulary size of byte-level text.
pub const BYTE_VOCAB: usize = 256;

/// One in this many bytes, or files, is held out for evaluation.
const HELD_OUT_FRACTION: usize = 20;

/// The crates whose sources are the text of [`ByteText::crate_sources`]. Cargo has downloaded these versions wherever
/// this crate was built.
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

/// Minimum size of the training and the held-out part: an input byte and its target.
const MIN_PART_BYTES: usize = 2;

/// Text as bytes, with a twentieth held out for evaluation: the end of text that was [read](Self::read), or every
/// 20th file of [crates](Self::crate_sources).
///
/// Bytes need no tokenizer and no particular encoding. Files with the byte order mark of another encoding are converted
/// to UTF-8.
#[derive(Clone, Debug)]
pub struct ByteText {
    training: TokenRange,
    held_out: TokenRange,
    num_files: usize,
    num_held_out: usize,
    remarks: Remarks,
    unread: Option<Unread>,
}

impl ByteText {
    /// Reads a file, or all files of a folder and its sub-folders in the order of their paths. At most `max_bytes`
    /// are read, and the rest is counted as [unread](Self::unread).
    ///
    /// A UTF-16 or UTF-32 file, identified by the mark at its start, is converted to UTF-8. Marks are not part of the
    /// text. All other files are read byte by byte.
    ///
    /// In a folder, links are followed, and a file that several links lead to is read once. Files are skipped if they
    /// are hidden, belong to version control, are not text, or cannot be read. [`remarks`](Self::remarks) counts them.
    /// The given path itself is read regardless of its name and content.
    ///
    /// # Errors
    ///
    /// If the path does not exist, is neither a file nor a folder, cannot be read, or contains fewer than 4 bytes of
    /// text.
    pub fn read(path: impl AsRef<Path>, max_bytes: usize) -> Result<Self, ModelError> {
        Self::read_without(path, max_bytes, &|_| false)
    }

    /// Works like [`read`](Self::read), but skips the files and sub-folders for which `is_excluded` returns true. It is
    /// called with absolute paths whose links are resolved.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_without(
        path: impl AsRef<Path>,
        max_bytes: usize,
        is_excluded: &dyn Fn(&Path) -> bool,
    ) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let metadata = path.metadata().map_err(|source| file_error(path, source))?;
        let mut reader = Reader::new(max_bytes, None, is_excluded);
        let read = if metadata.is_file() {
            reader.read_named(path)
        } else if metadata.is_dir() {
            reader.read_root(path)
        } else {
            return Err(ModelError::NotText {
                path: path.to_owned(),
            });
        };
        read.map_err(|source| file_error(path, source))?;
        with_end_apart(reader, path)
    }

    /// Reads the Rust sources of Burn's crates, in the order of their names. This is real text in a uniform style. It
    /// is available wherever this program was built, and is the same everywhere.
    ///
    /// # Errors
    ///
    /// If cargo does not have all of them.
    pub fn crate_sources() -> Result<Self, ModelError> {
        let path = registry_sources();
        let registries = || fs::read_dir(&path).into_iter().flatten().flatten();
        let mut reader = Reader::new(usize::MAX, Some(OsStr::new("rs")), &|_| false);
        for name in CRATES {
            let found = registries().map(|registry| registry.path().join(name).join("src"));
            let found = found.filter(|sources| sources.is_dir()).min();
            let read = found.map(|sources| reader.read_root(&sources));
            if !matches!(read, Some(Ok(()))) || reader.remarks.count(Remark::Unreadable) > 0 {
                let path = path.join("*").join(name);
                return Err(ModelError::NoCrateSources { path });
            }
        }
        let text = with_files_apart(reader);
        text.ok_or(ModelError::NoCrateSources { path })
    }

    /// Returns the stream of the training bytes.
    #[must_use]
    pub fn training(&self) -> TokenStream {
        TokenStream::Text(self.training.clone())
    }

    /// Returns the stream of the evaluation bytes.
    #[must_use]
    pub fn held_out(&self) -> TokenStream {
        TokenStream::Text(self.held_out.clone())
    }

    /// Returns the number of bytes, including held-out ones.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.training.num_tokens() + self.held_out.num_tokens()
    }

    /// Returns the training bytes and the evaluation bytes.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.training, &self.held_out].map(|part| part.as_bytes().unwrap_or_default())
    }

    /// Returns the number of files that were read.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.num_files
    }

    /// Returns the number of files that are held out entirely.
    #[must_use]
    pub fn num_held_out(&self) -> usize {
        self.num_held_out
    }

    /// Returns the remarks on files that were skipped or whose text differs from their bytes.
    #[must_use]
    pub fn remarks(&self) -> &Remarks {
        &self.remarks
    }

    /// Returns the text that was not read because of the limit, or `None` if everything was read.
    #[must_use]
    pub fn unread(&self) -> Option<&Unread> {
        self.unread.as_ref()
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

/// Holds out every 20th file, starting in the middle of the first 20. Returns `None` if there are too few.
fn with_files_apart(reader: Reader<'_>) -> Option<ByteText> {
    let mut parts = [Vec::new(), Vec::new()];
    let mut num_held_out = 0;
    let mut start = 0;
    for (index, &end) in reader.ends.iter().enumerate() {
        let is_held_out = index % HELD_OUT_FRACTION == HELD_OUT_FRACTION / 2;
        num_held_out += usize::from(is_held_out);
        parts[usize::from(is_held_out)].extend(&reader.bytes[start..end]);
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
        num_files: reader.ends.len(),
        num_held_out,
        remarks: reader.remarks,
        unread: reader.unread,
    })
}

/// Holds out the end of the text that was read from `path`.
fn with_end_apart(reader: Reader<'_>, path: &Path) -> Result<ByteText, ModelError> {
    let len = reader.bytes.len();
    let bytes: Arc<[u8]> = reader.bytes.into();
    let held_out_len = (len / HELD_OUT_FRACTION).max(MIN_PART_BYTES);
    let split = len.saturating_sub(held_out_len);
    let training = TokenRange::of_bytes(Arc::clone(&bytes), 0..split);
    let held_out = TokenRange::of_bytes(bytes, split..len);
    match (training, held_out) {
        (Some(training), Some(held_out)) if split >= MIN_PART_BYTES => Ok(ByteText {
            training,
            held_out,
            num_files: reader.ends.len(),
            num_held_out: 0,
            remarks: reader.remarks,
            unread: reader.unread,
        }),
        _ => Err(ModelError::TooLittleText {
            path: path.to_owned(),
            found: len,
            needed: 2 * MIN_PART_BYTES,
            remarks: reader.remarks,
        }),
    }
}

fn file_error(path: &Path, source: io::Error) -> ModelError {
    ModelError::File {
        path: path.to_owned(),
        source,
    }
}
