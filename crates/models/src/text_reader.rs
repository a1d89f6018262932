//! Reads the files of a text, up to a limit.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirEntry, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::encoding::{HEAD_BYTES, Marked, may_be_text, text_of};
use crate::remark::{Remark, Remarks};

/// Names of version control folders without a leading dot.
const VERSION_CONTROL: [&str; 2] = ["CVS", "_darcs"];

/// Maximum number of files and folders that are visited after the limit is reached, to count the remaining text.
const MOST_UNREAD: usize = 1 << 16;

/// The text that was not read because of the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unread {
    /// The file in which the text ends, or the first file after it.
    pub from: PathBuf,
    /// Number of bytes of files that were not read, whether they are text or not.
    pub bytes: u64,
    /// False if there are too many files to count all of them.
    pub is_all: bool,
}

/// A reader that appends files until the limit is reached.
pub(crate) struct Reader<'a> {
    max_bytes: usize,
    extension: Option<&'a OsStr>,
    /// Returns true for a path to skip, given with links resolved.
    is_excluded: &'a dyn Fn(&Path) -> bool,
    pub(crate) bytes: Vec<u8>,
    /// The end of each file in `bytes`.
    pub(crate) ends: Vec<usize>,
    pub(crate) remarks: Remarks,
    pub(crate) unread: Option<Unread>,
    /// Number of files and folders that may still be visited without being read.
    looks: usize,
    /// The paths of all files and folders so far, with links resolved.
    seen: HashSet<PathBuf>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(
        max_bytes: usize,
        extension: Option<&'a OsStr>,
        is_excluded: &'a dyn Fn(&Path) -> bool,
    ) -> Self {
        Self {
            max_bytes,
            extension,
            is_excluded,
            bytes: Vec::new(),
            ends: Vec::new(),
            remarks: Remarks::default(),
            unread: None,
            looks: MOST_UNREAD,
            seen: HashSet::new(),
        }
    }

    /// Reads a file that the caller named, regardless of its content.
    pub(crate) fn read_named(&mut self, path: &Path) -> io::Result<()> {
        self.read_file(path, true)
    }

    /// Reads a folder that the caller named, regardless of its name.
    pub(crate) fn read_root(&mut self, path: &Path) -> io::Result<()> {
        let real = path.canonicalize()?;
        self.seen.insert(real.clone());
        self.read_folder(path, &real)
    }

    /// Reads a folder in the order of names. `real` is its path with links resolved. Only a failure to list it is an
    /// error.
    fn read_folder(&mut self, path: &Path, real: &Path) -> io::Result<()> {
        let mut entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(DirEntry::file_name);
        for entry in entries {
            if self.is_full() {
                self.looks = self.looks.saturating_sub(1);
            }
            if self.looks == 0 {
                self.unread_at(&entry.path()).is_all = false;
                return Ok(());
            }
            if self.read_entry(&entry, real).is_err() {
                self.remarks.add(Remark::Unreadable, &entry.path());
            }
        }
        Ok(())
    }

    fn read_entry(&mut self, entry: &DirEntry, parent: &Path) -> io::Result<()> {
        let (kind, path, name) = (entry.file_type()?, entry.path(), entry.file_name());
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        if is_hidden || kind.is_dir() && is_version_control(&path, &name) {
            let remark = if (self.is_excluded)(&parent.join(&name)) {
                Remark::Excluded
            } else {
                Remark::Hidden
            };
            self.remarks.add(remark, &path);
            return Ok(());
        }
        let real = if kind.is_symlink() {
            match path.canonicalize() {
                Ok(real) => real,
                Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
                Err(_) => {
                    self.remarks.add(Remark::BrokenLink, &path);
                    return Ok(());
                }
            }
        } else {
            parent.join(&name)
        };
        if (self.is_excluded)(&real) {
            self.remarks.add(Remark::Excluded, &path);
            return Ok(());
        }
        let kind = if kind.is_symlink() {
            fs::metadata(&path)?.file_type()
        } else {
            kind
        };
        if !kind.is_dir() && !kind.is_file() {
            self.remarks.add(Remark::Special, &path);
        } else if kind.is_file() && !self.wants(&path) {
            // Another extension was requested.
        } else if parent.starts_with(&real) || !self.seen.insert(real.clone()) {
            self.remarks.add(Remark::Again, &path);
        } else if kind.is_dir() {
            return self.read_folder(&path, &real);
        } else {
            return self.read_file(&path, false);
        }
        Ok(())
    }

    fn wants(&self, path: &Path) -> bool {
        self.extension
            .is_none_or(|extension| path.extension() == Some(extension))
    }

    fn is_full(&self) -> bool {
        self.bytes.len() >= self.max_bytes
    }

    /// Returns the record of unread text. If there is none yet, the record begins with this file.
    fn unread_at(&mut self, path: &Path) -> &mut Unread {
        self.unread.get_or_insert_with(|| Unread {
            from: path.to_owned(),
            bytes: 0,
            is_all: true,
        })
    }

    /// Appends a file. A file that is not text is skipped unless it `is_named`.
    fn read_file(&mut self, path: &Path, is_named: bool) -> io::Result<()> {
        let left = self.max_bytes - self.bytes.len();
        if left == 0 {
            let len = path.metadata()?.len();
            if len > 0 {
                self.unread_at(path).bytes += len;
            }
            return Ok(());
        }
        let mut file = File::open(path)?;
        let mut bytes = Vec::new();
        file.by_ref()
            .take(left.min(HEAD_BYTES) as u64)
            .read_to_end(&mut bytes)?;
        if !is_named && !may_be_text(&bytes) {
            self.remarks.add(Remark::Binary, path);
            return Ok(());
        }
        let most = Marked::of(&bytes).map_or(left, |marked| marked.most_bytes(left));
        // A file is appended only after all of it was read. Otherwise, the text would depend on where reading failed.
        let rest = most.saturating_sub(bytes.len()) as u64;
        file.by_ref().take(rest).read_to_end(&mut bytes)?;
        let mut beyond = file.metadata()?.len().saturating_sub(bytes.len() as u64);
        let mut text = match text_of(bytes, beyond > 0) {
            Ok((text, remark)) => {
                if let Some(remark) = remark {
                    self.remarks.add(remark, path);
                }
                text
            }
            Err(bytes) if is_named => {
                self.remarks.add(Remark::NamedBinary, path);
                bytes
            }
            Err(_) => {
                self.remarks.add(Remark::Binary, path);
                return Ok(());
            }
        };
        beyond += text.len().saturating_sub(left) as u64;
        text.truncate(left);
        self.bytes.append(&mut text);
        self.ends.push(self.bytes.len());
        if beyond > 0 {
            self.unread_at(path).bytes += beyond;
        }
        Ok(())
    }
}

/// Returns true if a folder is the store of a version control system, by its name or as a bare repository.
fn is_version_control(folder: &Path, name: &OsStr) -> bool {
    VERSION_CONTROL.iter().any(|known| name == *known)
        || (folder.join("HEAD").is_file()
            && ["objects", "refs"]
                .iter()
                .all(|part| folder.join(part).is_dir()))
}
