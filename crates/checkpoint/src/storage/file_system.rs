//! The file system of this machine, including mounted ones.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{DirEntry, EntryKind, Lock, ReadFile, Storage, WriteFile};

/// The file system of the operating system, as a storage.
///
/// Files are read by position instead of being mapped, because steps may come from untrusted sources: if a mapped file
/// is truncated, a signal kills the process, and no error can be returned. A mapping would save nothing: reading a page
/// from the page cache costs one copy, and so does copying from a mapping into the caller's buffer.
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
            // Another rank has just created the folder.
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
        let file = without_following(OpenOptions::new().read(true)).open(path);
        Ok(Box::new(Read(regular(file, path)?)))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                let kind = kind_of(entry.file_type()?);
                entries.push(DirEntry { name, kind });
            }
        }
        Ok(entries)
    }

    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>> {
        match fs::symlink_metadata(path) {
            Ok(metadata) => Ok(Some(kind_of(metadata.file_type()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn copy_permissions(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::set_permissions(to, fs::symlink_metadata(from)?.permissions())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        match self.kind(path)? {
            // Uses open folder handles rather than paths, so a folder that is meanwhile replaced with a link is not
            // followed. It also removes entries whose names are not text.
            Some(EntryKind::Dir) => fs::remove_dir_all(path),
            Some(_) => fs::remove_file(path),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        match (path.canonicalize(), path.file_name()) {
            (Err(error), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(parent.unwrap_or(Path::new(".")).canonicalize()?.join(name))
            }
            (canonical, _) => canonical,
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        // Other systems cannot open folders, but record renames anyway.
        if !cfg!(unix) {
            return Ok(());
        }
        match File::open(path)?.sync_all() {
            // SMB and some user-space file systems do not support this call. The save then relies on their other
            // guarantees, which is better than no save.
            Err(error) if is_unsupported(&error) => Ok(()),
            result => result,
        }
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let file = regular(without_following(&mut options).open(path), path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(Locked(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                Ok(Some(Box::new(Unlocked)))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

fn kind_of(file_type: fs::FileType) -> EntryKind {
    match file_type {
        is if is.is_file() => EntryKind::File,
        is if is.is_dir() => EntryKind::Dir,
        is if is.is_symlink() => EntryKind::Link,
        _ => EntryKind::Other,
    }
}

/// Sets flags so that opening neither follows a link nor waits for the other end of a pipe.
fn without_following(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.bits() as i32);
    }
    options
}

/// Returns the opened file, or an error if it is not a regular file.
fn regular(opened: io::Result<File>, path: &Path) -> io::Result<File> {
    let is_regular = match &opened {
        Ok(file) => file.metadata()?.is_file(),
        // A link, folder or pipe that cannot be opened is reported as such.
        Err(_) => fs::symlink_metadata(path).map_or(true, |metadata| metadata.is_file()),
    };
    if is_regular {
        opened
    } else {
        let problem = "it is not a regular file";
        Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
    }
}

/// Returns true if the error means that the file system does not support the operation.
fn is_unsupported(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let codes = [Errno::NOSYS, Errno::NOTSUP, Errno::OPNOTSUPP, Errno::INVAL];
        if codes
            .iter()
            .any(|code| error.raw_os_error() == Some(code.raw_os_error()))
        {
            return true;
        }
    }
    error.kind() == io::ErrorKind::Unsupported
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

/// A locked file; the lock ends when the file is closed.
#[derive(Debug)]
struct Locked(#[expect(dead_code, reason = "held for its lock")] File);

impl Lock for Locked {}

/// The guard for file systems without locks, which locks nothing.
#[derive(Debug)]
struct Unlocked;

impl Lock for Unlocked {
    fn is_effective(&self) -> bool {
        false
    }
}
