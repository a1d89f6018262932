//! Optimizer state in files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::Tensor;
use burn_fsdp_shard::{Error, check_elementwise_once, gradients_by_unit};
use burn_pack::Reader;

use crate::optimizer_record::OptimizerParts;
use crate::typed_state::{is_usual, with_state};

/// An optimizer whose state lies in files, one for each unit of a sharded module: in memory is the
/// state of the unit that is being updated, and no other.
///
/// AdamW keeps two values for each parameter: with them in files, a rank needs memory for its
/// parameters and gradients only. Each step reads and writes all state once, so a fast disk and
/// large batches help. Values are the same bits as with the plain optimizer.
///
/// State belongs to the run: the files are removed when this is dropped, and a folder with files of
/// another run is refused. A file that is not what was written, to the bit, ends the step. For a
/// checkpoint, go through [`records`](Self::records) and [`restore`](Self::restore).
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
    /// Without any state.
    optimizer: ModuleOptimizer,
    folder: PathBuf,
    /// The files of the units that have state, by unit.
    files: BTreeMap<String, StateFile>,
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
            .field("folder", &self.folder)
            .field("num_units", &self.files.len())
            .finish_non_exhaustive()
    }
}

impl FileBackedOptimizer {
    /// Keeps the state of `optimizer` in `folder`, in a subfolder for rank `rank`. State that it has
    /// already is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerState`] if the subfolder cannot be made, or has something in it.
    pub fn new(
        optimizer: ModuleOptimizer,
        folder: impl AsRef<Path>,
        rank: usize,
    ) -> Result<Self, Error> {
        let folder = folder.as_ref().join(format!("rank-{rank}"));
        let made = fs::create_dir_all(&folder).and_then(|()| fs::read_dir(&folder));
        let mut entries = made.map_err(|error| {
            failure(
                "all",
                &folder,
                &error,
                "give a folder that can be written to",
            )
        })?;
        if entries.next().is_some() {
            let reason = "the folder is not empty";
            let advice = "give a folder that no other run uses, or remove what it left";
            return Err(failure("all", &folder, &reason, advice));
        }
        Ok(Self {
            optimizer: optimizer.load_record(OptimizerRecord::default()),
            folder,
            files: BTreeMap::new(),
        })
    }

    /// Updates `module` with `gradients`, as [`ModuleOptimizer::step`] does, unit by unit.
    ///
    /// Not collective. Gradients of this rank alone decide what is done, and all ranks of a sharded module step the same
    /// units.
    ///
    /// # Errors
    ///
    /// [`Error::WholeTensors`] at the first step; [`Error::OptimizerState`] if a file cannot be read or
    /// written. Some units are updated by then
    /// and others are not: go on from a checkpoint.
    pub fn step<M: Module>(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        mut module: M,
        gradients: GradientsParams,
    ) -> Result<M, Error> {
        let learning_rate = learning_rate.into();
        check_elementwise_once(&module, &self.optimizer)?;
        let gradients = without_empty(&module, gradients);
        for part in gradients_by_unit(&module, gradients) {
            if part.gradients.is_empty() {
                // Another rank owns what is trained of it. The step is a new version of the module on all ranks.
                let mut none = self.optimizer.clone();
                module = none.step(learning_rate.clone(), module, part.gradients);
                continue;
            }
            let mut optimizer = self.load(&part.unit)?;
            module = optimizer.step(learning_rate.clone(), module, part.gradients);
            self.store(part.unit, &optimizer)?;
        }
        Ok(module)
    }

    /// Returns the state of each unit that has one, read one at a time when it is asked for, with the path of the unit.
    pub fn records(&self) -> impl Iterator<Item = Result<(&str, OptimizerRecord), Error>> {
        let files = self.files.iter();
        files.map(|(unit, file)| Ok((unit.as_str(), file.read(unit)?)))
    }

    /// Sets the state of one unit, as [`records`](Self::records) gave it.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerState`] if the file cannot be written.
    pub fn restore(&mut self, unit: &str, record: OptimizerRecord) -> Result<(), Error> {
        let advice = "give it what `records` gave";
        let path = self.path_of(unit);
        let refused = |reason: &dyn std::fmt::Display| failure(unit, &path, reason, advice);
        let record = record.into_bytes().map_err(|error| refused(&error))?;
        let record = Reader::from_bytes(record).map_err(|error| refused(&error))?;
        let parts = OptimizerParts::of(record).map_err(|error| refused(&error))?;
        let optimizer =
            with_state(self.optimizer.clone(), parts).map_err(|error| refused(&error))?;
        self.store(unit.to_owned(), &optimizer)
    }

    /// Returns the bytes of all state, in files.
    pub fn file_bytes(&self) -> u64 {
        let lens = self.files.values().map(|file| fs::metadata(&file.path));
        lens.map(|metadata| metadata.map_or(0, |metadata| metadata.len()))
            .sum()
    }

    fn load(&self, unit: &str) -> Result<ModuleOptimizer, Error> {
        let Some(file) = self.files.get(unit) else {
            return Ok(self.optimizer.clone());
        };
        let damaged = |reason: &dyn std::fmt::Display| failure(unit, &file.path, reason, DAMAGED);
        file.check(unit)?;
        let record = Reader::from_file(&file.path).map_err(|error| damaged(&error))?;
        let parts = OptimizerParts::of(record).map_err(|error| damaged(&error))?;
        if is_usual(&parts) {
            // Without a copy.
            return Ok(self.optimizer.clone().load_record(file.load(unit)?));
        }
        with_state(self.optimizer.clone(), parts).map_err(|error| damaged(&error))
    }

    /// Returns the file of a unit, which need not be there.
    fn path_of(&self, unit: &str) -> PathBuf {
        let known = self.files.get(unit).map(|file| file.path.clone());
        known.unwrap_or_else(|| self.folder.join(file_name(self.files.len(), unit)))
    }

    /// Replaces the file as a whole: a reader sees the old state or the new.
    fn store(&mut self, unit: String, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let path = self.path_of(&unit);
        let saved = optimizer.save(&path);
        saved.map_err(|error| failure(&unit, &path, &error, "make room on the disk"))?;
        let checksum = checksum(&path);
        let checksum = checksum.map_err(|error| failure(&unit, &path, &error, DAMAGED))?;
        self.files.insert(unit, StateFile { path, checksum });
        Ok(())
    }
}

impl StateFile {
    /// Returns the state, if the file is what was written.
    fn read(&self, unit: &str) -> Result<OptimizerRecord, Error> {
        self.check(unit)?;
        self.load(unit)
    }

    fn load(&self, unit: &str) -> Result<OptimizerRecord, Error> {
        let loaded = OptimizerRecord::load(&self.path);
        loaded.map_err(|error| failure(unit, &self.path, &error, DAMAGED))
    }

    fn check(&self, unit: &str) -> Result<(), Error> {
        let damaged = |reason: &dyn std::fmt::Display| failure(unit, &self.path, reason, DAMAGED);
        match checksum(&self.path).map_err(|error| damaged(&error))? == self.checksum {
            true => Ok(()),
            false => Err(damaged(&"its bytes are not those that were written")),
        }
    }
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

/// Takes out the gradients of shards without elements: nothing in them is updated, and Burn reads an empty
/// state back from a file at an address that its kernels refuse.
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

const DAMAGED: &str = "do not touch the folder during a run; go on from a checkpoint";

/// Returns a name that tells people which unit it is, whatever the path is made of.
fn file_name(number: usize, unit: &str) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() || c == '.' || c == '_' {
        true => c,
        false => '-',
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
            // Nobody could do anything about a file that cannot be removed.
            let _ = fs::remove_file(&file.path);
        }
        let _ = fs::remove_dir(&self.folder);
    }
}
