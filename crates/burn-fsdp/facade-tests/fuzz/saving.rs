//! Saving the steps of legs: directly, in the background, and by a rank that dies meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::storage::{
    DirEntry, EntryKind, FileSystem, Lock, Memory, ReadFile, Storage, WriteFile,
};
use burn_fsdp::internals::checkpoint::{
    GroupRendezvous, SaveRequest, TrainingSnapshot, TrainingState, save_step,
};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::{Checkpointer, Error, ProcessGroup};

use super::legs::{Death, End, Place};
use super::run::{KILLED, Run, Strike};

/// The storage of a training run's steps.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    storage: Arc<dyn Storage>,
    folder: PathBuf,
    /// Removes the files, if there are any.
    _files: Option<Arc<tempfile::TempDir>>,
}

impl Shelf {
    pub(crate) fn new(is_in_memory: bool) -> io::Result<Self> {
        Ok(if is_in_memory {
            Self {
                storage: Arc::new(Memory::new()),
                folder: PathBuf::from("steps"),
                _files: None,
            }
        } else {
            let files = tempfile::tempdir()?;
            Self {
                storage: Arc::new(FileSystem),
                folder: files.path().to_owned(),
                _files: Some(Arc::new(files)),
            }
        })
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::with_storage(self.storage.clone(), &self.folder)
    }

    /// Returns the steps for a rank that dies in one of the calls of its storage.
    fn dying(&self, calls: usize, panics: bool) -> Checkpoints {
        let storage = Dying {
            inner: self.storage.clone(),
            left: AtomicUsize::new(calls),
            panics,
        };
        Checkpoints::with_storage(Arc::new(storage), &self.folder)
    }

    /// Removes the steps saved after a step: a rank may have died when everything was written.
    pub(crate) fn forget_after(&self, step: u64) -> Result<(), Error> {
        let checkpoints = self.checkpoints();
        for later in checkpoints.steps()? {
            if later > step {
                let path = checkpoints.path(later);
                let removed = self.storage.remove_tree(&path);
                removed.expect("a folder that is there");
            }
        }
        Ok(())
    }
}

/// Saves the state of a run after this many steps.
pub(crate) fn save(
    run: &mut dyn Run,
    checkpoints: &Checkpoints,
    step: usize,
    world: &ProcessGroup,
) -> Result<(), Error> {
    let mut taken = run.snapshot()?;
    let request = request(run, &taken, step);
    let mut rendezvous = GroupRendezvous::new(world.clone());
    save_step(checkpoints, &request, &mut taken.snapshot, &mut rendezvous)?;
    Ok(())
}

fn request(run: &dyn Run, taken: &TrainingSnapshot, step: usize) -> SaveRequest {
    let training = TrainingState {
        step: step as u64,
        optimizer: taken.optimizer.clone(),
        loss_scale: run.loss_scale(),
        ..TrainingState::default()
    };
    SaveRequest::new(taken.plan.clone(), training)
}

/// Saves step `end`, and performs the event that follows.
pub(crate) fn finish(
    run: &mut dyn Run,
    shelf: &Shelf,
    (end, how): (usize, End),
    world: &ProcessGroup,
) -> Result<(), Error> {
    match how {
        End::Nothing => save(run, &shelf.checkpoints(), end, world),
        End::InBackground => in_background(run, &shelf.checkpoints(), end, world),
        End::Death(death) => {
            save(run, &shelf.checkpoints(), end, world)?;
            die(run, shelf, (end, death), world)
        }
    }
}

/// Saves a step while the next one runs.
fn in_background(
    run: &mut dyn Run,
    checkpoints: &Checkpoints,
    step: usize,
    world: &ProcessGroup,
) -> Result<(), Error> {
    let deadline = Duration::from_secs(60);
    let mut saves = Checkpointer::new(world, checkpoints.clone(), deadline)?;
    let offered = saves.offer(run.snapshot()?)?;
    let request = request(run, offered.taken(), step);
    saves.begin(offered, request, true)?;
    run.step(step, &Strike::default())?;
    match saves.finish()? {
        Some(failure) => Err(failure.into()),
        None => Ok(()),
    }
}

/// Continues until a rank dies.
fn die(
    run: &mut dyn Run,
    shelf: &Shelf,
    (end, death): (usize, Death),
    world: &ProcessGroup,
) -> Result<(), Error> {
    let strike = Strike::new(Some(death), end, world);
    run.step(end, &strike)?;
    let is_own = death.rank % world.size() == world.rank();
    let checkpoints = match death.place {
        Place::Storage(calls) if is_own => shelf.dying(calls, death.panics),
        _ => shelf.checkpoints(),
    };
    save(run, &checkpoints, end + 1, world)
}

/// Returns the parameters of the newest step by path.
pub(crate) fn saved_params(checkpoints: &Checkpoints) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let step = checkpoints.newest()?;
    let tensors = step.index().tensors.iter();
    tensors
        .filter(|tensor| tensor.kind.is_model())
        .map(|tensor| {
            let all = Region::Flat(0..tensor.shape.iter().product());
            let bytes = step.read(&tensor.name, &all)?;
            let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
            let values = bytes.chunks_exact(4).map(number).collect();
            Ok((tensor.name.clone(), values))
        })
        .collect()
}

/// A storage that a rank uses until it dies.
#[derive(Debug)]
struct Dying {
    inner: Arc<dyn Storage>,
    /// Calls before its death.
    left: AtomicUsize,
    panics: bool,
}

impl Dying {
    fn living(&self) -> io::Result<&dyn Storage> {
        let next = |left: usize| left.checked_sub(1);
        match self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next)
        {
            Ok(_) => Ok(&*self.inner),
            // A panic in cleanup code after another panic would end all ranks.
            Err(_) if self.panics && !std::thread::panicking() => panic!("{KILLED}"),
            Err(_) => Err(io::Error::other(KILLED)),
        }
    }
}

impl Storage for Dying {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.living()?.create_dir_all(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.living()?.create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.living()?.create_file(path)
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        self.living()?.open_file(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.living()?.list(path)
    }

    fn kind(&self, path: &Path) -> io::Result<Option<EntryKind>> {
        self.living()?.kind(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.living()?.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.living()?.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.living()?.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.living()?.sync_dir(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        self.living()?.lock(path)
    }
}
