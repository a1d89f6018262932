//! A folder of steps that a run holds: its lock, its names, and unreadable files.

mod common;

use std::io;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::{
    DirEntry, EntryKind, FileSystem, Lock, Memory, ReadFile, Storage, WriteFile,
};
use burn_fsdp_checkpoint::{Check, Checkpoints, Error, Existing, Staging};
use common::Kind;

fn save(checkpoints: &Checkpoints, step: u64) {
    common::save_step(
        checkpoints,
        &common::plan(&common::line(2), Kind::Flat),
        step,
    );
}

#[test]
fn a_run_locks_its_folder_and_saves_to_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let root = dir.path().join("not/there/yet");
    let run = Checkpoints::new(&root).acquire().expect("free");
    assert!(run.is_exclusive());
    let other = Checkpoints::new(&root);
    assert!(!other.is_exclusive());
    let refused = |result: Result<(), Error>| {
        let error = result.expect_err("held");
        assert!(matches!(error, Error::Locked { .. }), "{error}");
    };
    refused(other.clone().acquire().map(drop));
    refused(Staging::create(&other, 1, Existing::Refuse).map(drop));
    save(&run, 1);
    // A save of the same run waits for its turn, and for no longer than others wait.
    let staging = Staging::create(&run, 2, Existing::Refuse).expect("free");
    refused(Staging::create(&run, 3, Existing::Refuse).map(drop));
    drop(staging);
    save(&run, 2);
    drop(run);
    save(&other, 3);
    assert_eq!(other.steps().expect("lists"), [1, 2, 3]);
}

#[test]
fn a_save_waits_briefly_for_a_lock() {
    let dir = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(dir.path());
    let staging = Staging::create(&checkpoints, 1, Existing::Refuse).expect("free");
    let (begun, begins) = std::sync::mpsc::channel();
    let other = checkpoints.clone();
    let waiting = std::thread::spawn(move || {
        begun.send(()).expect("waited for");
        save(&other, 2);
    });
    begins.recv().expect("sent");
    std::thread::sleep(std::time::Duration::from_millis(50));
    drop(staging);
    waiting.join().expect("saved");
    assert_eq!(checkpoints.steps().expect("lists"), [2]);
}

#[test]
fn acquiring_a_folder_cleans_it_and_restores_replaced_steps() {
    let memory = Memory::new();
    let checkpoints = Checkpoints::with_storage(Arc::new(memory.clone()), "run");
    save(&checkpoints, 7);
    let aside = "run/.step-000007.replaced-0123456789abcdef";
    memory
        .rename(Path::new("run/step-000007"), Path::new(aside))
        .expect("renames");
    let left = Path::new("run/.step-000009.partial-0123456789abcdef/x");
    memory.write(left, vec![1]).expect("writes");
    assert!(checkpoints.steps().expect("lists").is_empty());
    let run = checkpoints.acquire().expect("free");
    assert_eq!(run.steps().expect("lists"), [7]);
    let names = memory.list(Path::new("run")).expect("lists");
    let hidden = names.iter().filter(|entry| entry.name.starts_with(".step"));
    assert_eq!(hidden.count(), 0, "{names:?}");
}

#[test]
fn an_unwritable_folder_is_an_error_before_the_first_save() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "").expect("writes");
    let error = Checkpoints::new(file.join("run"))
        .acquire()
        .expect_err("below a file");
    assert!(matches!(error, Error::Io { .. }), "{error}");
    let error = Checkpoints::new(&file).acquire().expect_err("a file");
    assert!(error.to_string().contains("file"), "{error}");
    #[cfg(target_os = "linux")]
    {
        let error = Checkpoints::new("/proc/steps")
            .acquire()
            .expect_err("not writable");
        assert!(error.to_string().contains("/proc/steps"), "{error}");
    }
}

#[test]
fn a_step_is_identified_by_the_number_in_its_index() {
    let dir = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(dir.path());
    for step in [10, 22] {
        save(&checkpoints, step);
    }
    std::fs::rename(checkpoints.path(22), checkpoints.path(30)).expect("renames");
    let error = checkpoints.newest().expect_err("of another number");
    let message = error.to_string();
    assert!(
        message.contains("step-000030") && message.contains("step-000022"),
        "{message}"
    );
    let good = checkpoints.newest_good(Check::Everything).expect("finds");
    assert_eq!(good.step.expect("some").index().training.step, 10);
    assert_eq!(good.skipped[0].step, 30);
    // It does not count as a kept step, and nothing is removed because of it.
    let one = std::num::NonZeroUsize::MIN;
    assert!(checkpoints.keep_last(one, 30).is_err());
    assert_eq!(checkpoints.steps().expect("lists"), [10, 30]);
}

#[test]
fn a_temporarily_unreadable_step_is_not_skipped() {
    let memory = Memory::new();
    let checkpoints = Checkpoints::with_storage(Arc::new(memory.clone()), "run");
    for step in [1, 2] {
        save(&checkpoints, step);
    }
    for kind in [
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::StaleNetworkFileHandle,
        io::ErrorKind::Other,
    ] {
        let away = Away {
            inner: Box::new(memory.clone()),
            fails: |path| path.ends_with("step-000002/rank-00001.safetensors"),
            kind,
        };
        let away = Checkpoints::with_storage(Arc::new(away), "run");
        let error = away
            .newest_good(Check::Everything)
            .expect_err("cannot be read");
        assert!(
            !error.is_damage() && matches!(error, Error::Io { .. }),
            "{error}"
        );
    }
}

#[test]
fn file_systems_without_locks_work_and_are_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let lockless = || {
        let storage = Away {
            inner: Box::new(FileSystem),
            fails: |_| false,
            kind: io::ErrorKind::Other,
        };
        Checkpoints::with_storage(Arc::new(storage), dir.path())
    };
    let run = lockless().acquire().expect("there is nothing to hold");
    assert!(!run.is_exclusive());
    save(&run, 1);
    assert_eq!(run.steps().expect("lists"), [1]);
}

/// A storage without locks, in which some files cannot be read.
#[derive(Debug)]
struct Away {
    inner: Box<dyn Storage>,
    fails: fn(&Path) -> bool,
    kind: io::ErrorKind,
}

#[derive(Debug)]
struct NoLock;

impl Lock for NoLock {
    fn is_effective(&self) -> bool {
        false
    }
}

impl Storage for Away {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir_all(path)
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.inner.create_file(path)
    }
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        if (self.fails)(path) {
            Err(self.kind.into())
        } else {
            self.inner.open_file(path)
        }
    }
    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.inner.list(path)
    }
    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>> {
        self.inner.kind(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)?;
        // As a network file system that lost its answer and repeated the request.
        Err(io::ErrorKind::NotFound.into())
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.remove_dir(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.sync_dir(path)
    }
    fn lock(&self, _: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        Ok(Some(Box::new(NoLock)))
    }
}
