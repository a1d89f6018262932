//! A storage in memory that can simulate crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{DirEntry, EntryKind, Lock, ReadFile, Storage, WriteFile};

/// A storage in memory, for tests. [`crash`](Self::crash) discards unsynced data, like a power failure.
///
/// A file keeps its synced bytes and any prefix of the bytes written after them. A folder keeps its entries as of its
/// last sync or any later moment, because journaling file systems keep changes in order. Different files and folders
/// are independent of each other.
#[derive(Clone, Default)]
pub struct Memory {
    disk: Arc<Mutex<Disk>>,
}

/// Chooses how much unsynced data survives a crash.
pub trait Keep {
    /// Returns the number of changes since the last sync to keep, from 0 to `most` inclusive.
    fn changes(&mut self, most: usize) -> usize;
}

impl<F: FnMut(usize) -> usize> Keep for F {
    fn changes(&mut self, most: usize) -> usize {
        self(most)
    }
}

/// The number that identifies a file or folder.
type Node = usize;

/// The entries of a folder.
type Entries = BTreeMap<String, Node>;

#[derive(Default)]
struct Disk {
    files: BTreeMap<Node, FileNode>,
    /// Folder 0 is the root.
    dirs: BTreeMap<Node, DirNode>,
    num_nodes: usize,
    locked: BTreeSet<PathBuf>,
    /// Number of crashes. It keeps guards from before a crash from releasing locks taken after it.
    life: usize,
}

#[derive(Default, Clone)]
struct FileNode {
    bytes: Vec<u8>,
    synced_len: usize,
}

#[derive(Default)]
struct DirNode {
    entries: Entries,
    /// The entries as of the last sync, and after every change since then except the last.
    history: Vec<Entries>,
}

impl DirNode {
    fn change(&mut self, change: impl FnOnce(&mut Entries)) {
        self.history.push(self.entries.clone());
        change(&mut self.entries);
    }
}

impl Memory {
    /// Creates an empty storage.
    pub fn new() -> Self {
        Self::default()
    }

    /// Simulates a loss of power. Keeps synced data, and as much unsynced data as `keep` chooses. Releases all locks.
    pub fn crash(&self, mut keep: impl Keep) {
        let mut disk = self.disk();
        disk.locked.clear();
        disk.life += 1;
        for file in disk.files.values_mut() {
            let unsynced = file.bytes.len() - file.synced_len;
            let kept = keep.changes(unsynced).min(unsynced);
            file.bytes.truncate(file.synced_len + kept);
            file.synced_len = file.bytes.len();
        }
        for dir in disk.dirs.values_mut() {
            let most = dir.history.len();
            let kept = keep.changes(most).min(most);
            if kept < most {
                dir.entries = dir.history.swap_remove(kept);
            }
            dir.history.clear();
        }
    }

    /// Returns the bytes of a file, if there is one.
    pub fn read(&self, path: &Path) -> Option<Vec<u8>> {
        let disk = self.disk();
        let node = disk.node(path).ok()?;
        disk.files.get(&node).map(|file| file.bytes.clone())
    }

    /// Stores a file and its folders, all synced.
    pub fn write(&self, path: &Path, bytes: Vec<u8>) -> io::Result<()> {
        let parent = path.parent().unwrap_or(Path::new(""));
        self.create_dir_all(parent)?;
        let mut disk = self.disk();
        let (parent, name) = disk.parent(path)?;
        let node = disk.new_node();
        let synced_len = bytes.len();
        disk.files.insert(node, FileNode { bytes, synced_len });
        let dir = disk.dirs.get_mut(&parent).ok_or_else(not_found)?;
        if let Some(old) = dir.entries.insert(name, node) {
            disk.files.remove(&old);
        }
        Ok(())
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock()
    }
}

impl Disk {
    fn new_node(&mut self) -> Node {
        self.num_nodes += 1;
        self.num_nodes
    }

    fn node(&self, path: &Path) -> io::Result<Node> {
        let mut node = 0;
        for component in path.components() {
            let Component::Normal(name) = component else {
                continue;
            };
            let name = name.to_str().ok_or_else(not_found)?;
            let entries = self.dirs.get(&node).map(|dir| &dir.entries);
            node = *entries
                .and_then(|entries| entries.get(name))
                .ok_or_else(not_found)?;
        }
        Ok(node)
    }

    fn kind(&self, node: Node) -> EntryKind {
        if self.files.contains_key(&node) {
            EntryKind::File
        } else {
            EntryKind::Dir
        }
    }

    fn dir(&mut self, path: &Path) -> io::Result<&mut DirNode> {
        let node = self.node(path)?;
        if node == 0 {
            return Ok(self.dirs.entry(0).or_default());
        }
        self.dirs.get_mut(&node).ok_or_else(not_found)
    }

    /// Returns the folder of an entry, and the entry's name.
    fn parent(&mut self, path: &Path) -> io::Result<(Node, String)> {
        let name = path.file_name().and_then(|name| name.to_str());
        let parent = path.parent().unwrap_or(Path::new(""));
        self.dir(parent)?;
        Ok((self.node(parent)?, name.ok_or_else(not_found)?.to_owned()))
    }

    /// Adds a new node to its folder, unless the name is taken.
    fn enter(&mut self, path: &Path, node: Node) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let dir = self.dirs.get_mut(&parent).ok_or_else(not_found)?;
        if dir.entries.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        dir.change(|entries| {
            entries.insert(name, node);
        });
        Ok(())
    }

    fn leave(&mut self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let dir = self.dirs.get_mut(&parent).ok_or_else(not_found)?;
        dir.change(|entries| {
            entries.remove(&name);
        });
        Ok(())
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Storage for Memory {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        if path.as_os_str().is_empty() || path == Path::new("/") || self.exists(path)? {
            return Ok(());
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        self.create_dir_all(parent)?;
        self.create_dir(path)?;
        self.sync_dir(parent)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        let node = disk.new_node();
        disk.enter(path, node)?;
        disk.dirs.insert(node, DirNode::default());
        Ok(())
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let mut disk = self.disk();
        let node = disk.new_node();
        disk.enter(path, node)?;
        disk.files.insert(node, FileNode::default());
        drop(disk);
        let disk = self.clone();
        Ok(Box::new(MemoryFile { disk, node }))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let disk = self.disk();
        let node = disk.node(path)?;
        if !disk.files.contains_key(&node) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        drop(disk);
        let disk = self.clone();
        Ok(Box::new(MemoryFile { disk, node }))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut disk = self.disk();
        let entries = disk.dir(path)?.entries.clone();
        let entry = |(name, node): (String, Node)| DirEntry {
            name,
            kind: disk.kind(node),
        };
        Ok(entries.into_iter().map(entry).collect())
    }

    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>> {
        let disk = self.disk();
        Ok(disk.node(path).ok().map(|node| disk.kind(node)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        let node = disk.node(from)?;
        let (parent, from_name) = disk.parent(from)?;
        let (to_parent, to_name) = disk.parent(to)?;
        if parent != to_parent {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        let dir = disk.dirs.get(&parent).ok_or_else(not_found)?;
        if let Some(target) = dir.entries.get(&to_name)
            && let Some(dir) = disk.dirs.get(target)
            && !dir.entries.is_empty()
        {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let dir = disk.dirs.get_mut(&parent).ok_or_else(not_found)?;
        dir.change(|entries| {
            entries.remove(&from_name);
            entries.insert(to_name, node);
        });
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        let node = disk.node(path)?;
        if disk.dirs.contains_key(&node) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        disk.leave(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        if !disk.dir(path)?.entries.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        disk.leave(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.disk().dir(path)?.history.clear();
        Ok(())
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        let mut disk = self.disk();
        if !disk.locked.insert(path.to_owned()) {
            return Ok(None);
        }
        let life = disk.life;
        drop(disk);
        Ok(Some(Box::new(MemoryLock {
            disk: self.clone(),
            path: path.to_owned(),
            life,
        })))
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = self.disk();
        f.debug_struct("Memory")
            .field("num_files", &disk.files.len())
            .finish_non_exhaustive()
    }
}

struct MemoryFile {
    disk: Memory,
    node: Node,
}

impl WriteFile for MemoryFile {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.disk.disk();
        let file = disk.files.get_mut(&self.node).ok_or_else(not_found)?;
        file.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut disk = self.disk.disk();
        let file = disk.files.get_mut(&self.node).ok_or_else(not_found)?;
        file.synced_len = file.bytes.len();
        Ok(())
    }
}

impl ReadFile for MemoryFile {
    fn num_bytes(&self) -> io::Result<u64> {
        let disk = self.disk.disk();
        let file = disk.files.get(&self.node).ok_or_else(not_found)?;
        Ok(file.bytes.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let disk = self.disk.disk();
        let file = disk.files.get(&self.node).ok_or_else(not_found)?;
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(buffer.len()));
        let bytes = start.zip(end).and_then(|(s, e)| file.bytes.get(s..e));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryLock {
    disk: Memory,
    path: PathBuf,
    life: usize,
}

impl Lock for MemoryLock {}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        let mut disk = self.disk.disk();
        if disk.life == self.life {
            disk.locked.remove(&self.path);
        }
    }
}
