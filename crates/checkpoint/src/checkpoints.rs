//! A folder of steps. It lists them, finds the newest good one, and removes old ones.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::folder_lock::{FolderLock, RunLock};
use crate::folder_name::{self, Hidden, State};
use crate::index::{INDEX_FILE, SEAL_FILE};
use crate::step_around::step_around;
use crate::storage::{DirEntry, EntryKind, FileSystem, Storage, write_synced};
use crate::{Error, Limits, Step};

/// A folder with one sub-folder for each step.
///
/// Readers ignore all other names, including hidden ones. A link is never followed below the folder; the folder itself
/// may be reached through one.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    storage: Arc<dyn Storage>,
    root: PathBuf,
    limits: Limits,
    /// The lock of [`acquire`](Self::acquire), shared by all clones.
    held: Option<Arc<RunLock>>,
}

/// The check that a step must pass to be good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Checks the index and the size of every file.
    Sizes,
    /// Checks every byte.
    Everything,
}

/// The newest good step, and the newer steps that are not good.
#[derive(Debug)]
pub struct NewestGood {
    /// The newest good step; `None` if the folder has no step at all.
    pub step: Option<Step>,
    /// The newer steps, all damaged, newest first.
    pub skipped: Vec<Skipped>,
}

/// A step that was skipped because it is damaged.
#[derive(Debug)]
pub struct Skipped {
    /// Number of the step.
    pub step: u64,
    /// Folder of the step.
    pub path: PathBuf,
    /// The error that shows the damage.
    pub error: Error,
}

/// The result of a removal of older steps.
#[derive(Debug, Default)]
pub(crate) struct Removal {
    /// The steps that were removed, oldest first.
    pub(crate) removed: Vec<u64>,
    /// The reasons why other older steps were not removed, oldest step first.
    pub(crate) stays: Vec<Error>,
}

impl Checkpoints {
    /// Returns a handle to the checkpoints in a folder of the file system. The first save creates the folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_storage(Arc::new(FileSystem), root)
    }

    /// Returns a handle to the checkpoints in a folder of another storage.
    pub fn with_storage(storage: Arc<dyn Storage>, root: impl Into<PathBuf>) -> Self {
        Self {
            storage,
            root: root.into(),
            limits: Limits::default(),
            held: None,
        }
    }

    /// Locks the folder against all other runs and saves, for as long as this value or a clone of it lives. Creates the
    /// folder if necessary, removes the remains of dead runs, and tests whether a step can be written. Saves through
    /// this value and its clones share the lock and take turns.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another run or save is working in the folder; [`Error::NotForSteps`] if it is a step or is
    /// inside one; [`Error::Io`] if it cannot be created or written to.
    pub fn acquire(mut self) -> Result<Self, Error> {
        self.check_is_for_steps()?;
        let made = self.storage.create_dir_all(&self.root);
        made.map_err(Error::io("create", &self.root))?;
        let lock = RunLock::new(&*self.storage, &self.root)?;
        self.clean()?;
        self.try_out()?;
        self.held = Some(Arc::new(lock));
        Ok(self)
    }

    /// Returns true if the folder is locked by [`acquire`](Self::acquire) and the lock excludes others. Some network
    /// file systems do not support locks. On those, users must make sure that no two runs save into one folder.
    pub fn is_exclusive(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_effective())
    }

    /// Rejects a folder for steps that is a step or is inside one, because its steps would be mistaken for that step.
    pub(crate) fn check_is_for_steps(&self) -> Result<(), Error> {
        match step_around(&*self.storage, &self.root, None) {
            Some(step) => Err(Error::NotForSteps {
                path: self.root.clone(),
                step,
            }),
            None => Ok(()),
        }
    }

    /// Creates and removes a hidden folder with a file in it, as a save would.
    fn try_out(&self) -> Result<(), Error> {
        let path = self.hidden_path(&Hidden::new(0, State::Partial));
        let made = self.storage.create_dir(&path);
        made.map_err(Error::io("create", &path))?;
        let written = write_synced(&*self.storage, &path.join(INDEX_FILE), b"tried out");
        let removed = self.storage.remove_tree(&path);
        written?;
        removed.map_err(Error::io("remove", &path))
    }

    /// Sets the limits for reading steps.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Returns the folder of steps.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Returns the folder of a step, whether it exists or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(folder_name::of_step(step))
    }

    pub(crate) fn hidden_path(&self, hidden: &Hidden) -> PathBuf {
        self.root.join(hidden.to_string())
    }

    /// Lists the existing steps, in ascending order. The list is empty if the folder does not exist, or if nothing in
    /// it has the name of a step.
    ///
    /// The last one is the step that [`newest`](Self::newest) opens. A link or a file is skipped if a folder is newer.
    ///
    /// # Errors
    ///
    /// [`Error::NotAFolder`] if a link or a file has the name of the newest step, because continuing from the last real
    /// step would use an older state; [`Error::NotForSteps`] if the folder is a step or is inside one; [`Error::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, Error> {
        let named = self.named_as_steps()?;
        if let Some((step, kind)) = named.last() {
            self.check_folder(*step, *kind)?;
        }
        Ok(folders(named).collect())
    }

    /// Returns true if anything in the folder has the name of a step: a folder, a link or a file.
    ///
    /// # Errors
    ///
    /// [`Error::NotForSteps`] if the folder is a step or is inside one; [`Error::Io`].
    pub fn is_begun(&self) -> Result<bool, Error> {
        Ok(!self.named_as_steps()?.is_empty())
    }

    /// Lists the entries that have the name of a step, in ascending order.
    fn named_as_steps(&self) -> Result<Vec<(u64, EntryKind)>, Error> {
        self.check_is_for_steps()?;
        let numbered = |entry: DirEntry| Some((folder_name::parse_step(&entry.name)?, entry.kind));
        let mut named: Vec<_> = self.entries()?.into_iter().filter_map(numbered).collect();
        named.sort_unstable_by_key(|(step, _)| *step);
        Ok(named)
    }

    fn entries(&self) -> Result<Vec<DirEntry>, Error> {
        let exists = self.storage.exists(&self.root);
        if !exists.map_err(Error::io("look for", &self.root))? {
            return Ok(Vec::new());
        }
        let entries = self.storage.list(&self.root);
        entries.map_err(Error::io("list", &self.root))
    }

    /// Opens a step.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the folder holds a step with a different number, because it was renamed or copied;
    /// [`Error::NotAFolder`] if a link or a file has its name; otherwise the errors of [`Step::open`].
    pub fn open(&self, step: u64) -> Result<Step, Error> {
        let path = self.path(step);
        let kind = self.storage.kind(&path);
        let kind = kind.map_err(Error::io("look for", &path))?;
        self.check_folder(step, kind.unwrap_or(EntryKind::Dir))?;
        let opened = Step::open_in(Arc::clone(&self.storage), &path, self.limits)?;
        match opened.index().training.step {
            inside if inside == step => Ok(opened),
            inside => {
                let own = folder_name::of_step(inside);
                let problem = format!(
                    "it is step {inside}, but its folder is named for step {step}; rename the folder to {own}"
                );
                Err(Error::invalid(&path.join(INDEX_FILE), problem))
            }
        }
    }

    /// Opens the newest step.
    ///
    /// # Errors
    ///
    /// [`Error::NoStep`] if there is none; otherwise the errors of [`steps`](Self::steps) and [`open`](Self::open).
    pub fn newest(&self) -> Result<Step, Error> {
        match self.steps()?.last() {
            Some(step) => self.open(*step),
            None => Err(Error::NoStep {
                path: self.root.clone(),
            }),
        }
    }

    fn check_folder(&self, step: u64, kind: EntryKind) -> Result<(), Error> {
        let found = match kind {
            EntryKind::Dir => return Ok(()),
            EntryKind::Link => "a link",
            EntryKind::File | EntryKind::Other => "a file",
        };
        let path = self.path(step);
        Err(Error::NotAFolder { path, found })
    }

    /// Finds the newest good step. Skips only damaged steps (see [`Error::is_damage`]), and returns them as well.
    ///
    /// # Errors
    ///
    /// [`Error::NoGoodStep`] if there are steps and all are damaged; [`Error::NotAFolder`] if a link or a file has the
    /// name of a newer one; [`Error::NotForSteps`] if the folder is a step or is inside one; [`Error::Io`] if the
    /// folder cannot be listed or a step cannot be read, which does not mean that it is damaged.
    pub fn newest_good(&self, check: Check) -> Result<NewestGood, Error> {
        let mut skipped = Vec::new();
        for (number, kind) in self.named_as_steps()?.into_iter().rev() {
            self.check_folder(number, kind)?;
            match self.open_good(number, check) {
                Ok(step) => {
                    let step = Some(step);
                    return Ok(NewestGood { step, skipped });
                }
                Err(error) if error.is_damage() => {
                    let path = self.path(number);
                    tracing::warn!(path = %path.display(), %error, "step skipped");
                    skipped.push(Skipped {
                        step: number,
                        path,
                        error,
                    });
                }
                Err(error) => return Err(error),
            }
        }
        let count = skipped.len();
        match skipped.into_iter().next() {
            None => Ok(NewestGood {
                step: None,
                skipped: Vec::new(),
            }),
            Some(newest) => Err(Error::NoGoodStep {
                path: self.root.clone(),
                count,
                newest: Box::new(newest.error),
            }),
        }
    }

    fn open_good(&self, number: u64, check: Check) -> Result<Step, Error> {
        let step = self.open(number)?;
        match check {
            Check::Sizes => step.check_sizes()?,
            Check::Everything => step.verify(|_| ())?,
        }
        Ok(step)
    }

    /// Removes whole steps older than `newest_good`, except the `keep - 1` newest of them. Returns the removed steps,
    /// oldest first.
    ///
    /// Steps that are incomplete or newer than `newest_good` are neither counted nor removed, because they may be the
    /// only ones left to repair. The same applies to steps that contain foreign files.
    ///
    /// # Errors
    ///
    /// The error if the step `newest_good` cannot be opened or a file of it has the wrong size, before anything is
    /// removed; [`Error::Locked`] during a save; [`Error::NotForSteps`]; [`Error::Io`].
    pub fn keep_last(&self, keep: NonZeroUsize, newest_good: u64) -> Result<Vec<u64>, Error> {
        self.open_good(newest_good, Check::Sizes)?;
        let _lock = self.lock()?;
        Ok(self.remove_older(keep, newest_good)?.removed)
    }

    /// Does the work of [`keep_last`](Self::keep_last) for a step known to be good. The caller must hold the lock.
    pub(crate) fn remove_older(
        &self,
        keep: NonZeroUsize,
        newest_good: u64,
    ) -> Result<Removal, Error> {
        let mut removal = Removal::default();
        // Entries newer than `newest_good` may be links, so they are not checked.
        let folders: Vec<_> = folders(self.named_as_steps()?).collect();
        let older = folders.into_iter().rev();
        let whole = older
            .filter(|step| *step < newest_good)
            .filter(|step| self.open_good(*step, Check::Sizes).is_ok());
        let mut left = keep.get() - 1;
        for step in whole {
            match self.check_removable(step) {
                Ok(()) if left > 0 => left -= 1,
                Ok(()) => {
                    self.remove(step)?;
                    removal.removed.push(step);
                }
                // A step that cannot be removed does not count as kept. This one would be kept anyway, so it is not
                // reported.
                Err(_) if left > 0 => {}
                Err(error) => removal.stays.push(error),
            }
        }
        removal.removed.reverse();
        removal.stays.reverse();
        Ok(removal)
    }

    /// Removes all steps, oldest first, so that a new run can use this folder. Returns the removed steps. Damaged steps
    /// are removed as well.
    ///
    /// # Errors
    ///
    /// [`Error::NotAFolder`] if a link or a file has the name of a step, and [`Error::Foreign`] if a step contains a
    /// file that does not belong to it, both before anything is removed; [`Error::Locked`] during a save;
    /// [`Error::NotForSteps`] if the folder is a step or is inside one; [`Error::Io`].
    pub fn clear(&self) -> Result<Vec<u64>, Error> {
        let _lock = self.lock()?;
        let named = self.named_as_steps()?;
        for (step, kind) in &named {
            self.check_folder(*step, *kind)?;
            self.check_removable(*step)?;
        }
        let steps: Vec<_> = named.into_iter().map(|(step, _)| step).collect();
        steps.iter().try_for_each(|step| self.remove(*step))?;
        Ok(steps)
    }

    /// Checks that the folder of a step may be removed. It must be a folder that holds only files with names from a
    /// save; the files may be damaged.
    pub(crate) fn check_removable(&self, step: u64) -> Result<(), Error> {
        let path = self.path(step);
        let kind = self.storage.kind(&path);
        let kind = kind.map_err(Error::io("look for", &path))?;
        self.check_folder(step, kind.unwrap_or(EntryKind::Dir))?;
        let entries = self.storage.list(&path).map_err(Error::io("list", &path))?;
        let is_ours = |entry: &DirEntry| {
            let name = entry.name.as_str();
            let is_rank_file = name.ends_with(".safetensors") && !name.starts_with('.');
            let is_known = [INDEX_FILE, SEAL_FILE].contains(&name) || is_rank_file;
            // Removes a link itself, but not its target.
            is_known && entry.kind != EntryKind::Dir
        };
        match entries.into_iter().find(|entry| !is_ours(entry)) {
            None => Ok(()),
            Some(DirEntry { name, .. }) => Err(Error::Foreign { path, name }),
        }
    }

    /// Removes a step. Hides it first, so a crash leaves it either whole or hidden.
    fn remove(&self, step: u64) -> Result<(), Error> {
        let path = self.path(step);
        let hidden = self.hidden_path(&Hidden::new(step, State::Removed));
        self.rename(&path, &hidden)?;
        let synced = self.storage.sync_dir(&self.root);
        synced.map_err(Error::io("sync", &self.root))?;
        let removed = self.storage.remove_tree(&hidden);
        removed.map_err(Error::io("remove", &hidden))
    }

    /// Renames inside the folder to an unused name, under the lock.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        match self.storage.rename(from, to) {
            // A network file system may repeat a request whose answer was lost. It then reports that there is nothing
            // to rename, although it has done the rename. Nobody else can have renamed it, because of the lock.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let is_done = !self.storage.exists(from).unwrap_or(true)
                    && self.storage.exists(to).unwrap_or(false);
                is_done.then_some(()).ok_or(error)
            }
            result => result,
        }
        .map_err(Error::io("rename", from))
    }

    /// Locks the folder against other saves.
    pub(crate) fn lock(&self) -> Result<FolderLock, Error> {
        match &self.held {
            Some(held) => RunLock::turn(held, &self.root),
            None => FolderLock::new(&*self.storage, &self.root),
        }
    }

    /// Removes the remains of dead runs, and restores a step that a dead run was replacing. The caller must hold the
    /// lock, so nothing else is working in the folder.
    ///
    /// A remnant that cannot be removed only takes space, so the failure is only a warning.
    pub(crate) fn clean(&self) -> Result<(), Error> {
        for entry in self.entries()? {
            let Some(hidden) = Hidden::parse(&entry.name) else {
                continue;
            };
            let path = self.hidden_path(&hidden);
            let visible = self.path(hidden.step);
            // A run died between the two renames of a replacement, so the old step is restored.
            let is_lost = hidden.state == State::Replaced
                && entry.kind == EntryKind::Dir
                && !self
                    .storage
                    .exists(&visible)
                    .map_err(Error::io("look for", &visible))?;
            if is_lost {
                self.rename(&path, &visible)?;
                let synced = self.storage.sync_dir(&self.root);
                synced.map_err(Error::io("sync", &self.root))?;
            } else if let Err(error) = self.storage.remove_tree(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove the leftovers of a run that died");
            }
        }
        Ok(())
    }
}

/// Returns the entries that are folders.
fn folders(named: Vec<(u64, EntryKind)>) -> impl Iterator<Item = u64> {
    let folders = named
        .into_iter()
        .filter(|(_, kind)| *kind == EntryKind::Dir);
    folders.map(|(step, _)| step)
}
