//! A storage that fails on demand and counts reads.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_fsdp_checkpoint::storage::{DirEntry, EntryKind, Lock, ReadFile, Storage, WriteFile};

/// The modifying operations that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fail {
    Never,
    /// Only this one, as when a disk is full.
    At(usize),
    /// This one and all later ones, as when the process is killed. Half of a write is done.
    From(usize),
}

/// Another storage with failures.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    fail: Fail,
    changes: Arc<AtomicUsize>,
    bytes_read: Arc<AtomicU64>,
    /// The paths that were opened for reading.
    pub opened: Mutex<Vec<PathBuf>>,
}

impl<S: Storage> Faulty<S> {
    pub fn new(inner: S, fail: Fail) -> Self {
        Self {
            inner,
            fail,
            changes: Arc::default(),
            bytes_read: Arc::default(),
            opened: Mutex::default(),
        }
    }

    /// Returns the number of modifying operations so far.
    pub fn num_changes(&self) -> usize {
        self.changes.load(Ordering::SeqCst)
    }

    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::SeqCst)
    }

    fn strike(&self) -> io::Result<()> {
        strike(self.fail, &self.changes)
    }
}

fn strike(fail: Fail, changes: &AtomicUsize) -> io::Result<()> {
    let number = changes.fetch_add(1, Ordering::SeqCst);
    let fails = match fail {
        Fail::Never => false,
        Fail::At(at) => number == at,
        Fail::From(from) => number >= from,
    };
    if fails {
        Err(io::Error::other("told to fail"))
    } else {
        Ok(())
    }
}

impl<S: Storage> Storage for Faulty<S> {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.create_dir_all(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.strike()?;
        Ok(Box::new(FaultyWrite {
            inner: self.inner.create_file(path)?,
            fail: self.fail,
            changes: Arc::clone(&self.changes),
        }))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        self.opened.lock().expect("no panic").push(path.to_owned());
        Ok(Box::new(CountedRead {
            inner: self.inner.open_file(path)?,
            bytes_read: Arc::clone(&self.bytes_read),
        }))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.inner.list(path)
    }

    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>> {
        self.inner.kind(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.strike()?;
        self.inner.sync_dir(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        self.strike()?;
        self.inner.lock(path)
    }
}

struct FaultyWrite {
    inner: Box<dyn WriteFile>,
    fail: Fail,
    changes: Arc<AtomicUsize>,
}

impl WriteFile for FaultyWrite {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = strike(self.fail, &self.changes) {
            self.inner.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.inner.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        strike(self.fail, &self.changes)?;
        self.inner.sync()
    }
}

struct CountedRead {
    inner: Box<dyn ReadFile>,
    bytes_read: Arc<AtomicU64>,
}

impl ReadFile for CountedRead {
    fn num_bytes(&self) -> io::Result<u64> {
        self.inner.num_bytes()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.bytes_read
            .fetch_add(buffer.len() as u64, Ordering::SeqCst);
        self.inner.read_exact_at(buffer, offset)
    }
}
