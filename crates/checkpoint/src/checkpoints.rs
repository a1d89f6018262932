//! A folder of steps: which there are, which is good, which may go.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::folder_name::{self, Hidden, State};
use crate::storage::{self, FileSystem, Lock, Storage};
use crate::{Error, Limits, Step};

/// Name of the file that a save locks.
const LOCK_FILE: &str = ".lock";

/// A folder with one sub-folder for each step.
///
/// Names that are no steps', hidden ones included, are left alone by every reader.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    storage: Arc<dyn Storage>,
    root: PathBuf,
    limits: Limits,
}

/// How much of a step to look at before calling it good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The index, and that every file has its size.
    Sizes,
    /// Every byte.
    Everything,
}

/// The newest good step, and what is newer but is not good.
#[derive(Debug)]
pub struct NewestGood {
    /// None if there is no good step at all.
    pub step: Option<Step>,
    /// The damaged steps that are newer, newest first.
    pub skipped: Vec<Skipped>,
}

/// A step that cannot be used.
#[derive(Debug)]
pub struct Skipped {
    /// Its folder.
    pub path: PathBuf,
    /// Why.
    pub error: Error,
}

impl Checkpoints {
    /// A folder of the file system. It is made by the first save.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_storage(Arc::new(FileSystem), root)
    }

    /// A folder of another storage.
    pub fn with_storage(storage: Arc<dyn Storage>, root: impl Into<PathBuf>) -> Self {
        Self {
            storage,
            root: root.into(),
            limits: Limits::default(),
        }
    }

    /// Reads steps up to other sizes.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The folder of a step, be it there or not.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(folder_name::of_step(step))
    }

    pub(crate) fn hidden_path(&self, hidden: &Hidden) -> PathBuf {
        self.root.join(hidden.to_string())
    }

    /// The steps that are there, in ascending order. None if the folder does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, Error> {
        let mut steps: Vec<_> = self
            .entries()?
            .into_iter()
            .filter_map(|name| folder_name::parse_step(&name))
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Names of the sub-folders.
    fn entries(&self) -> Result<Vec<String>, Error> {
        let exists = self.storage.exists(&self.root);
        if !exists.map_err(Error::io("look for", &self.root))? {
            return Ok(Vec::new());
        }
        let entries = self.storage.list(&self.root);
        let entries = entries.map_err(Error::io("list", &self.root))?;
        let dirs = entries.into_iter().filter(|entry| entry.is_dir);
        Ok(dirs.map(|entry| entry.name).collect())
    }

    /// Opens a step.
    ///
    /// # Errors
    ///
    /// As [`Step::open`].
    pub fn open(&self, step: u64) -> Result<Step, Error> {
        Step::open_in(Arc::clone(&self.storage), self.path(step), self.limits)
    }

    /// Opens the newest step.
    ///
    /// # Errors
    ///
    /// [`Error::NoStep`] if there is none, else as [`Step::open`].
    pub fn newest(&self) -> Result<Step, Error> {
        match self.steps()?.last() {
            Some(step) => self.open(*step),
            None => Err(Error::NoStep {
                path: self.root.clone(),
            }),
        }
    }

    /// Looks for the newest step that is good, from the newest on, and says which it skipped and why.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be listed.
    pub fn newest_good(&self, check: Check) -> Result<NewestGood, Error> {
        let mut skipped = Vec::new();
        for number in self.steps()?.into_iter().rev() {
            match self.open_good(number, check) {
                Ok(step) => {
                    let step = Some(step);
                    return Ok(NewestGood { step, skipped });
                }
                Err(error) => {
                    let path = self.path(number);
                    tracing::warn!(path = %path.display(), %error, "step skipped");
                    skipped.push(Skipped { path, error });
                }
            }
        }
        Ok(NewestGood {
            step: None,
            skipped,
        })
    }

    fn open_good(&self, number: u64, check: Check) -> Result<Step, Error> {
        let step = self.open(number)?;
        match check {
            Check::Sizes => step.check_sizes()?,
            Check::Everything => step.verify(|_| ())?,
        }
        Ok(step)
    }

    /// Removes whole steps older than `newest_good`, but for the `keep - 1` newest of them. Returns
    /// what it removed, oldest first.
    ///
    /// Steps that are newer than `newest_good` or are not whole are neither counted nor removed: they
    /// may be all that a person has left to repair.
    ///
    /// # Errors
    ///
    /// What [`newest_good`](Self::newest_good)'s check of sizes finds wrong with `newest_good` itself,
    /// before anything is removed; [`Error::Locked`] during a save; [`Error::Io`].
    pub fn keep_last(&self, keep: NonZeroUsize, newest_good: u64) -> Result<Vec<u64>, Error> {
        self.open_good(newest_good, Check::Sizes)?;
        let _lock = self.lock()?;
        self.remove_older(keep, newest_good)
    }

    /// [`keep_last`](Self::keep_last) of a step known to be good, under the lock.
    pub(crate) fn remove_older(
        &self,
        keep: NonZeroUsize,
        newest_good: u64,
    ) -> Result<Vec<u64>, Error> {
        let mut removed = Vec::new();
        let older = self.steps()?.into_iter().rev();
        let whole = older
            .filter(|step| *step < newest_good)
            .filter(|step| self.open_good(*step, Check::Sizes).is_ok());
        for step in whole.skip(keep.get() - 1) {
            self.remove(step)?;
            removed.push(step);
        }
        removed.reverse();
        Ok(removed)
    }

    /// Removes a step: hidden first, so that a crash leaves it whole or unseen.
    fn remove(&self, step: u64) -> Result<(), Error> {
        let path = self.path(step);
        let hidden = self.hidden_path(&Hidden::new(step, State::Removed));
        let renamed = self.storage.rename(&path, &hidden);
        renamed.map_err(Error::io("rename", &path))?;
        let synced = self.storage.sync_dir(&self.root);
        synced.map_err(Error::io("sync", &self.root))?;
        let removed = storage::remove_tree(&*self.storage, &hidden);
        removed.map_err(Error::io("remove", &hidden))
    }

    /// Holds off other saves into this folder.
    pub(crate) fn lock(&self) -> Result<Box<dyn Lock>, Error> {
        let path = self.root.join(LOCK_FILE);
        let lock = self.storage.lock(&path).map_err(Error::io("lock", &path))?;
        lock.ok_or(Error::Locked { path })
    }

    /// Removes what dead runs left behind, under the lock: nobody else is at work in the folder.
    ///
    /// A leftover that cannot be removed takes space but harms nothing, so that is only a warning.
    pub(crate) fn clean(&self) -> Result<(), Error> {
        for name in self.entries()? {
            let Some(hidden) = Hidden::parse(&name) else {
                continue;
            };
            let path = self.hidden_path(&hidden);
            let visible = self.path(hidden.step);
            // A run that died between the two renames of a replacement: the old step comes back.
            let is_lost = hidden.state == State::Replaced
                && !self
                    .storage
                    .exists(&visible)
                    .map_err(Error::io("look for", &visible))?;
            if is_lost {
                let renamed = self.storage.rename(&path, &visible);
                renamed.map_err(Error::io("rename", &path))?;
                let synced = self.storage.sync_dir(&self.root);
                synced.map_err(Error::io("sync", &self.root))?;
            } else if let Err(error) = storage::remove_tree(&*self.storage, &path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove what a dead run left");
            }
        }
        Ok(())
    }
}
