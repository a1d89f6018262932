//! Where files lie: what the rest of the crate asks of a file system.

use std::fmt;
use std::io;
use std::path::Path;

mod file_system;
mod memory;

pub use file_system::FileSystem;
pub use memory::{Keep, Memory};

/// Files and folders that outlive the process.
///
/// Commits rely on three promises, which POSIX file systems keep:
///
/// 1. [`rename`](Self::rename) inside a folder is atomic: after a crash the folder shows the old
///    names or the new, and nothing between.
/// 2. What [`WriteFile::sync`] has returned from survives a crash, and so do the entries of a folder
///    after [`sync_dir`](Self::sync_dir).
/// 3. A [`lock`](Self::lock) ends with the process that holds it, however that ends.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Makes a folder and those above it that are missing, to last. No error if it is there.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder; an error if it is there.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes a file; an error if it is there.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;

    /// Opens a file. Refuses anything else, such as a link or a pipe.
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;

    /// What is in a folder, in no order.
    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Whether there is anything of this name, be it a link to nothing.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Gives a file or folder another name in the same folder, at once.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file or link.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Returns when the entries of a folder will survive a crash.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Locks a file, making it if need be, until the guard is dropped or the process ends. `None` if
    /// somebody else holds it.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>>;
}

/// A file that is being written.
pub trait WriteFile: Send {
    /// Appends all of these bytes.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns when everything written will survive a crash.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is being read, by any number of threads.
pub trait ReadFile: Send + Sync {
    /// Bytes of the file.
    fn num_bytes(&self) -> io::Result<u64>;

    /// Fills the buffer from the bytes at `offset`; an error if the file ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Something that is locked as long as this lives.
pub trait Lock: fmt::Debug + Send {}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name; entries whose names are no text are not listed.
    pub name: String,
    /// Whether it is a folder, as opposed to a file or link.
    pub is_dir: bool,
}

/// Removes a folder with everything in it, following no links.
pub(crate) fn remove_tree(storage: &dyn Storage, path: &Path) -> io::Result<()> {
    for entry in storage.list(path)? {
        let path = path.join(&entry.name);
        match entry.is_dir {
            true => remove_tree(storage, &path)?,
            false => storage.remove_file(&path)?,
        }
    }
    storage.remove_dir(path)
}
