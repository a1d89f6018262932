//! The file system of this machine, or one that it mounts.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::Path;

use super::{DirEntry, Lock, ReadFile, Storage, WriteFile};

/// The file system.
///
/// Files are read by position instead of being mapped. A mapped file that somebody truncates kills
/// the process with a signal that no program can turn into an error, and steps may come from
/// anyone; a read of a page that is in the page cache costs the one copy that a load from a mapping into
/// the caller's buffer costs, too.
#[derive(Debug, Clone, Copy, Default)]
pub struct FileSystem;

impl Storage for FileSystem {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        if path.as_os_str().is_empty() || path.is_dir() {
            return Ok(());
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        self.create_dir_all(parent)?;
        match fs::create_dir(path) {
            // Another rank was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            result => result?,
        }
        self.sync_dir(parent)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Box::new(Written(file)))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        // Asked before opening: a pipe would block the opener for ever.
        if !fs::symlink_metadata(path)?.is_file() {
            let problem = "it is not a regular file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        Ok(Box::new(Read(File::open(path)?)))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                let is_dir = entry.file_type()?.is_dir();
                entries.push(DirEntry { name, is_dir });
            }
        }
        Ok(entries)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match fs::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let path = match path.as_os_str().is_empty() {
            true => Path::new("."),
            false => path,
        };
        // Other systems cannot open folders; theirs record renames by themselves.
        match cfg!(unix) {
            true => File::open(path)?.sync_all(),
            false => Ok(()),
        }
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(Locked(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

struct Written(File);

impl WriteFile for Written {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }
}

struct Read(File);

impl ReadFile for Read {
    fn num_bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    #[cfg(unix)]
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, buffer, offset)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(&self.0, buffer, offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => {
                    buffer = &mut buffer[count..];
                    offset += count as u64;
                }
            }
        }
        Ok(())
    }
}

/// The lock ends when the file is closed.
#[derive(Debug)]
struct Locked(#[expect(dead_code, reason = "held for its lock")] File);

impl Lock for Locked {}
