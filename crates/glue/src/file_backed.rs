//! Optimizer state in files.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::Tensor;
use burn_fsdp_shard::{Error, catch, check_elementwise_once, gradients_by_unit};
use burn_pack::Reader;

use crate::optimizer_record::{OptimizerParts, check_taken};

/// An optimizer whose state is in files, one for each unit of a sharded module. Only the state of the unit
/// that is being updated is in memory.
///
/// AdamW keeps two values for each parameter: with them in files, a rank needs memory only for its parameters and
/// gradients, and [`ShardPolicy::in_files`](burn_fsdp_shard::ShardPolicy::in_files) also keeps these in files. Each step reads and writes all state once, so a fast disk and large batches help. The results are
/// bit-identical to the plain optimizer's.
///
/// The files are removed when this is dropped. A folder that another run uses is rejected. The files of a killed run
/// are removed; a folder with any other file is rejected, and left unchanged. A step fails if a file has changed by
/// even one bit since it was written. To save and load [checkpoints](burn_fsdp_checkpoint), use
/// [`snapshot`](Self::snapshot) and [`restore_step`](Self::restore_step).
///
/// ```no_run
/// # use burn::{nn::Linear, optim::AdamWConfig, tensor::Tensor};
/// # use burn_fsdp::optim::FileBackedOptimizer;
/// # use burn_fsdp::{backward, Error, ProcessGroup};
/// # fn train(world: &ProcessGroup, mut model: Linear, loss: Tensor<1>) -> Result<(), Error> {
/// let optimizer = AdamWConfig::new().init();
/// let mut optimizer = FileBackedOptimizer::new(optimizer, "/scratch/adamw", world.rank())?;
/// let gradients = backward(loss, &model)?;
/// model = optimizer.step(1e-3, model, gradients)?;
/// # Ok(())
/// # }
/// ```
pub struct FileBackedOptimizer {
    /// The configuration, without any state.
    optimizer: ModuleOptimizer,
    folder: Arc<Folder>,
    /// The state files, by unit path.
    files: BTreeMap<String, StateFile>,
}

/// The folder of a rank, which is removed with the last file in it.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    /// The folder's lock against other runs; `None` on file systems without locks.
    _lock: Option<File>,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // This fails if other programs have put files there.
        let _ = fs::remove_dir(&self.path);
    }
}

/// A file with the state of a unit.
struct StateFile {
    path: PathBuf,
    /// CRC-32 of the file as it was written.
    checksum: u32,
}

impl std::fmt::Debug for FileBackedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileBackedOptimizer")
            .field("folder", &self.folder.path)
            .field("num_units", &self.files.len())
            .finish_non_exhaustive()
    }
}

impl FileBackedOptimizer {
    /// Creates an optimizer that keeps its state in a subfolder of `folder` for rank `rank`. Existing state of
    /// `optimizer` is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerState`] if the subfolder cannot be created, is a link, is used by another run, or contains
    /// anything except state that an earlier run left.
    pub fn new(
        optimizer: ModuleOptimizer,
        folder: impl AsRef<Path>,
        rank: usize,
    ) -> Result<Self, Error> {
        let folder = folder_of(folder.as_ref(), rank);
        let made = fs::create_dir_all(&folder);
        made.map_err(|error| failure("all", &folder, &error, WRITABLE))?;
        let lock = take(&folder)?;
        Ok(Self {
            optimizer: optimizer.load_record(OptimizerRecord::default()),
            folder: Arc::new(Folder {
                path: folder,
                _lock: lock,
            }),
            files: BTreeMap::new(),
        })
    }

    /// Removes the files of rank `rank` that a killed run left in `folder`, with the same checks as [`new`](Self::new).
    /// Creates nothing.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn clean(folder: impl AsRef<Path>, rank: usize) -> Result<(), Error> {
        let folder = folder_of(folder.as_ref(), rank);
        if folder.symlink_metadata().is_err() {
            return Ok(());
        }
        let _lock = take(&folder)?;
        // Later runs create the folder again.
        let _ = fs::remove_dir(&folder);
        Ok(())
    }

    /// Updates `module` with `gradients`, as [`ModuleOptimizer::step`] does, unit by unit.
    ///
    /// Not collective. It depends only on the gradients of this rank, and all ranks of a sharded module step the same
    /// units.
    ///
    /// # Errors
    ///
    /// [`Error::WholeTensors`] at the first step; [`Error::OptimizerState`] if a file cannot be read or written. After
    /// a file error, only some units are updated: continue from a checkpoint.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        mut module: M,
        gradients: GradientsParams,
    ) -> Result<M, Error> {
        let learning_rate = learning_rate.into();
        check_elementwise_once(&module, &self.optimizer)?;
        for part in gradients_by_unit(&module, gradients) {
            let gradients = without_empty(&module, part.gradients);
            if gradients.is_empty() {
                // Other ranks hold all elements of the unit's trained parameters. Every rank must step the module,
                // because the step creates a new version of it.
                let mut none = self.optimizer.clone();
                module = catch(|| none.step(learning_rate.clone(), module, gradients))?;
                continue;
            }
            let mut optimizer = self.load(&part.unit)?;
            module = catch(|| optimizer.step(learning_rate.clone(), module, gradients))?;
            self.store(part.unit, &optimizer)?;
        }
        Ok(module)
    }

    /// Returns the state of each unit that has one, with the path of the unit. States are read one at a time, on
    /// demand.
    pub fn records(&self) -> impl Iterator<Item = Result<(&str, OptimizerRecord), Error>> {
        let files = self.files.iter();
        files.map(|(unit, file)| Ok((unit.as_str(), file.read(unit)?)))
    }

    /// Sets the state of one unit, as returned by [`records`](Self::records).
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerState`] if the file cannot be written.
    pub fn restore(&mut self, unit: &str, record: OptimizerRecord) -> Result<(), Error> {
        let optimizer = self.optimizer.clone().load_record(record);
        self.store(unit.to_owned(), &optimizer)
    }

    /// Returns the size of all state files in bytes.
    pub fn file_bytes(&self) -> u64 {
        let lens = self.files.values().map(|file| fs::metadata(&file.path));
        lens.map(|metadata| metadata.map_or(0, |metadata| metadata.len()))
            .sum()
    }

    /// Returns the optimizer without any state.
    pub(crate) fn configured(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// Removes all state.
    pub(crate) fn clear(&mut self) {
        for (_, file) in std::mem::take(&mut self.files) {
            // A file that stays is overwritten if it is needed again.
            let _ = fs::remove_file(file.path);
        }
    }

    /// Gives each unit's state file a second name, under which later steps do not change it.
    pub(crate) fn kept(&self) -> Result<Vec<KeptFile>, Error> {
        let files = self.files.iter();
        files
            .map(|(unit, file)| file.kept(unit, &self.folder))
            .collect()
    }

    fn load(&self, unit: &str) -> Result<ModuleOptimizer, Error> {
        let optimizer = self.optimizer.clone();
        match self.files.get(unit) {
            Some(file) => Ok(optimizer.load_record(file.read(unit)?)),
            None => Ok(optimizer),
        }
    }

    /// Replaces the unit's file atomically: a reader sees either the old state or the new.
    pub(crate) fn store(&mut self, unit: String, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let number = self.files.len();
        let known = self.files.get(&unit).map(|file| file.path.clone());
        let path = known.unwrap_or_else(|| self.folder.path.join(file_name(number, &unit)));
        let saved = optimizer.save(&path);
        saved.map_err(|error| failure(&unit, &path, &error, "free space on the disk"))?;
        let checksum = checksum(&path);
        let checksum = checksum.map_err(|error| failure(&unit, &path, &error, DAMAGED))?;
        let file = StateFile {
            path: path.clone(),
            checksum,
        };
        // Insert it before the check, so a rejected file is removed with the others.
        if self.files.insert(unit.clone(), file).is_none() {
            let record = Reader::from_file(&path);
            let record = record.map_err(|error| failure(&unit, &path, &error, DAMAGED))?;
            let parts = OptimizerParts::of(record);
            let taken = parts.and_then(|parts| check_taken(&self.optimizer, &parts));
            taken.map_err(|error| failure(&unit, &path, &error, NO_WAY_BACK))?;
        }
        Ok(())
    }
}

impl StateFile {
    /// Reads the state, if the file is unchanged since it was written.
    fn read(&self, unit: &str) -> Result<OptimizerRecord, Error> {
        let damaged = |reason: &dyn std::fmt::Display| failure(unit, &self.path, reason, DAMAGED);
        if checksum(&self.path).map_err(|error| damaged(&error))? != self.checksum {
            return Err(damaged(&"its bytes changed after they were written"));
        }
        OptimizerRecord::load(&self.path).map_err(|error| damaged(&error))
    }

    /// Links or copies the file to a second name, if it is unchanged since it was written. Later steps replace only the
    /// original.
    fn kept(&self, unit: &str, folder: &Arc<Folder>) -> Result<KeptFile, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self.path.with_extension(format!("bpk.kept-{number}.tmp"));
        // Not every file system supports links.
        let linked =
            fs::hard_link(&self.path, &path).or_else(|_| fs::copy(&self.path, &path).map(|_| ()));
        linked.map_err(|error| failure(unit, &path, &error, WRITABLE))?;
        let kept = KeptFile {
            path,
            checksum: self.checksum,
            is_right: OnceLock::new(),
            _folder: folder.clone(),
        };
        let damaged = |reason: &dyn std::fmt::Display| failure(unit, &self.path, reason, DAMAGED);
        if checksum(&kept.path).map_err(|error| damaged(&error))? == self.checksum {
            Ok(kept)
        } else {
            Err(damaged(&"its bytes changed after they were written"))
        }
    }
}

/// A state file under a second name, which is removed on drop. Until then, the folder exists and stays locked.
#[derive(Debug)]
pub(crate) struct KeptFile {
    pub(crate) path: PathBuf,
    checksum: u32,
    is_right: OnceLock<bool>,
    _folder: Arc<Folder>,
}

impl KeptFile {
    /// Checks before the first read that the file is unchanged since it was written.
    pub(crate) fn check(&self) -> io::Result<()> {
        let is_right = match self.is_right.get() {
            Some(is_right) => *is_right,
            None => {
                let found = checksum(&self.path)?;
                *self.is_right.get_or_init(|| found == self.checksum)
            }
        };
        if is_right {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "{}: its bytes changed after they were written; {DAMAGED}",
                self.path.display()
            )))
        }
    }
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn folder_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

/// Locks the folder of a rank, and removes the state that an earlier run left there. A process releases its lock when
/// it ends, so a free lock means that the run is dead. On file systems without locks, only an empty folder is accepted.
fn take(folder: &Path) -> Result<Option<File>, Error> {
    let refused = |reason: &dyn std::fmt::Display| failure("all", folder, reason, OF_OTHERS);
    let unread = |error: io::Error| failure("all", folder, &error, WRITABLE);
    // The folder that the user names may be a link, but not this one: an attacker could have planted it to have files
    // elsewhere removed.
    if folder
        .symlink_metadata()
        .is_ok_and(|entry| entry.is_symlink())
    {
        return Err(refused(&"it is a link, and links are not followed"));
    }
    let until = Instant::now() + PATIENCE;
    let lock = loop {
        match File::open(folder).map(|file| (file.try_lock(), file)) {
            Ok((Ok(()), file)) => break Some(file),
            Ok((Err(TryLockError::WouldBlock), _)) if Instant::now() < until => sleep(RETRY),
            Ok((Err(TryLockError::WouldBlock), _)) => {
                return Err(refused(&"another run is using it"));
            }
            // The previous run has removed its folder with its files.
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {
                fs::create_dir_all(folder).map_err(unread)?;
            }
            // Some systems cannot open or lock a folder.
            Ok((Err(TryLockError::Error(_)), _)) | Err(_) => break None,
        }
    };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(unread)?;
    let is_left = |entry: &fs::DirEntry| {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        is_file && is_state(&entry.file_name().to_string_lossy())
    };
    if let Some(other) = entries
        .iter()
        .find(|entry| lock.is_none() || !is_left(entry))
    {
        let name = other.file_name();
        return Err(refused(&format!(
            "it contains files of another run, such as {}",
            name.display()
        )));
    }
    for entry in entries {
        fs::remove_file(entry.path()).map_err(unread)?;
    }
    Ok(lock)
}

/// Returns true for the name of a state file, of Burn's temporary file for it, or of a kept copy.
fn is_state(name: &str) -> bool {
    let Some((number, rest)) = name.split_once('-') else {
        return false;
    };
    let (_, end) = rest.rsplit_once(".bpk").unwrap_or_default();
    let is_number = number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit());
    let is_whole = rest.ends_with(".bpk");
    is_number && (is_whole || end.starts_with('.') && end.ends_with(".tmp"))
}

/// Returns the CRC-32 of a file.
fn checksum(path: &Path) -> io::Result<u32> {
    let mut file = File::open(path)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hasher.finalize()),
            len => hasher.update(&piece[..len]),
        }
    }
}

/// Removes the gradients of empty shards. These need no update, and Burn would load an empty state at an address that
/// its kernels reject.
fn without_empty<M: Module>(module: &M, gradients: GradientsParams) -> GradientsParams {
    let mut rest = NotEmpty(gradients);
    module.visit(&mut rest);
    rest.0
}

struct NotEmpty(GradientsParams);

impl ModuleVisitor for NotEmpty {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.lazy_shape().num_elements() == 0 {
            self.0.remove::<D>(param.id);
        }
    }
}

/// Time to wait for a lock; a killed run releases it sooner.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two attempts to take the lock.
const RETRY: Duration = Duration::from_millis(20);

const WRITABLE: &str = "give a writable folder";

const OF_OTHERS: &str = "give a folder that no other run uses, or remove its contents";
const NO_WAY_BACK: &str = "no further step would be possible with it";

const DAMAGED: &str = "do not change the folder during a run; resume from a checkpoint";

/// Returns a valid file name from which people can recognize the unit.
fn file_name(number: usize, unit: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' || c == '_' {
            c
        } else {
            '-'
        }
    };
    let unit: String = unit.chars().map(plain).take(80).collect();
    format!("{number:05}-{unit}.bpk")
}

fn failure(unit: &str, file: &Path, reason: &dyn std::fmt::Display, advice: &'static str) -> Error {
    Error::OptimizerState {
        unit: unit.to_owned(),
        file: file.display().to_string(),
        reason: reason.to_string(),
        advice,
    }
}

impl Drop for FileBackedOptimizer {
    fn drop(&mut self) {
        for file in self.files.values() {
            // Nothing can be done about a file that cannot be removed.
            let _ = fs::remove_file(&file.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{file_name, is_state};

    #[test]
    fn files_of_state_are_known_by_name() {
        for unit in ["", "layers.0", "a-b.bpk.c", &"x".repeat(200)] {
            let name = file_name(7, unit);
            assert!(is_state(&name), "{name}");
            assert!(is_state(&format!("{name}.4711-0.tmp")), "{name}");
            assert!(is_state(&format!("{name}.kept-3.tmp")), "{name}");
            assert!(!is_state(&format!("{name}.zip")), "{name}");
        }
        for name in [
            "notes.txt",
            "00001",
            "00001-a",
            "1-a.bpk",
            "a0001-a.bpk",
            ".bpk",
            "x.tmp",
        ] {
            assert!(!is_state(name), "{name}");
        }
    }
}
