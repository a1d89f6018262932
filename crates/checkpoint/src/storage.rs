//! The storage interface: the file system operations that the rest of the crate uses.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::Error;

mod file_system;
mod memory;

pub use file_system::FileSystem;
pub use memory::{Keep, Memory};

/// Files and folders that persist beyond the process.
///
/// Commits rely on three guarantees, which POSIX file systems provide:
///
/// 1. [`rename`](Self::rename) inside a folder is atomic: after a crash the folder has either the old names or the new
///    ones.
/// 2. Data survives a crash after [`WriteFile::sync`] has returned, and so do the entries of a folder after
///    [`sync_dir`](Self::sync_dir).
/// 3. A [`lock`](Self::lock) ends with the process that holds it, however the process ends.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Creates a folder and its missing parents, durably. Succeeds if it exists.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;

    /// Creates a folder; fails if it exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates a file; fails if it exists.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;

    /// Opens a file. Anything else, such as a link or a pipe, is an error of the kind
    /// [`InvalidInput`](io::ErrorKind::InvalidInput).
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;

    /// Lists the entries of a folder, in no particular order.
    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Returns the kind of the entry at `path`, without following links; `None` if there is none.
    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>>;

    /// Returns true if there is anything at `path`, even a dangling link.
    fn exists(&self, path: &Path) -> io::Result<bool> {
        Ok(self.kind(path)?.is_some())
    }

    /// Renames a file or folder within its folder, atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Copies permissions from one file to another, if files have permissions.
    fn copy_permissions(&self, _from: &Path, _to: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Removes a file or link.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes a file, a link, or a folder with everything in it. Does not follow links, even if `path` is a link.
    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        match self.kind(path)? {
            None => Err(io::ErrorKind::NotFound.into()),
            Some(EntryKind::Dir) => {
                for entry in self.list(path)? {
                    self.remove_tree(&path.join(&entry.name))?;
                }
                self.remove_dir(path)
            }
            Some(_) => self.remove_file(path),
        }
    }

    /// Returns the path of a file or folder with all links resolved, which is the same for all of its names.
    ///
    /// The last component of the path need not exist.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.components().collect())
    }

    /// Syncs a folder; returns when its entries will survive a crash.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Locks a file until the guard is dropped or the process ends, and creates the file if necessary. Returns `None`
    /// if somebody else holds the lock.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>>;
}

/// A file that is being written.
pub trait WriteFile: Send {
    /// Appends all bytes.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns when everything written will survive a crash.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is being read, by any number of threads.
pub trait ReadFile: Send + Sync {
    /// Returns the size of the file in bytes.
    fn num_bytes(&self) -> io::Result<u64>;

    /// Fills the buffer with the bytes at `offset`; fails if the file ends too early.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// The guard of a lock. Dropping it releases the lock.
pub trait Lock: fmt::Debug + Send + Sync {
    /// Returns true if the lock excludes others. Some network file systems do not support locks; there the guard has no
    /// effect.
    fn is_effective(&self) -> bool {
        true
    }
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Name; entries whose names are not UTF-8 are not listed.
    pub name: String,
    /// Kind of the entry.
    pub kind: EntryKind,
}

/// The kind of an entry of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Dir,
    /// A symbolic link, no matter where it leads.
    Link,
    /// Anything else, such as a pipe or a device.
    Other,
}

/// Creates a file with these bytes, durably.
pub(crate) fn write_synced(storage: &dyn Storage, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = storage
        .create_file(path)
        .map_err(Error::io("create", path))?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    file.sync().map_err(Error::io("sync", path))
}
