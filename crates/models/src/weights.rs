//! Weights on disk, for both models.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use burn::store::burn_pack::Tensor as PackedTensor;
use burn::store::{ModuleAdapter, ModuleContext, ModuleSnapshot, SafetensorsStore, bridge};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};

use crate::header::{Header, TensorEntry};
use crate::stored::{OpenedFile, StoredTensor, StoredType};
use crate::table::HasTable;
use crate::weight_folder::WeightFolder;
use crate::{Architecture, Gpt, Gpt2, GptConfig, Llama, ModelError, ParameterSpec};

/// The safetensors that hold the weights of one model, all of them and nothing else, by the names
/// and the layout of its [table](Architecture::parameters): one file, or a folder in Hugging Face's
/// form, which may be of several files with an index.
///
/// There is no way to make one but [`open`](Self::open), which reads the headers
/// and compares them with the model, so that [`load`](Self::load) has
/// nothing left to complain about but the disk.
#[derive(Debug)]
pub struct WeightsFile<A: Architecture = GptConfig> {
    path: PathBuf,
    /// The tensors of the model, by path in its module.
    tensors: BTreeMap<String, StoredTensor>,
    config: A,
    num_bytes_read: AtomicU64,
}

impl<A: Architecture> WeightsFile<A> {
    /// Checks that a file or folder holds the weights of the configured model.
    ///
    /// Nothing in it is trusted: headers are read with bounds on every number, and no file outside
    /// of the folder is opened.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, is not well formed, or lacks a tensor of the
    /// model, has one more, or has one of another shape or type.
    pub fn open(path: impl Into<PathBuf>, config: A) -> Result<Self, ModelError> {
        config.validate()?;
        let path = path.into();
        let folder = match path.is_dir() {
            true => Some(WeightFolder::open(&path)?),
            false => None,
        };
        let files = match &folder {
            Some(folder) => folder.files(),
            None => vec![path.clone()],
        };
        let mut found = BTreeMap::new();
        for file in &files {
            let (opened, header) = read_header(file)?;
            if let Some(folder) = &folder {
                folder.check(file, header.tensors.keys())?;
            }
            let start = header.data_start;
            for (name, entry) in header.tensors {
                let Some(known) = config.name_of(name.clone()) else {
                    continue;
                };
                let shape = entry.shape.clone();
                let earlier = found.insert(known, (opened.clone(), start, entry));
                if earlier.is_some() {
                    return Err(ModelError::UnexpectedTensor {
                        path,
                        name,
                        found: shape,
                    });
                }
            }
        }
        let mut tensors = BTreeMap::new();
        for spec in config.parameters() {
            let entry = found.remove(&spec.name);
            let tensor = stored_tensor(&path, spec, entry)?;
            tensors.insert(tensor.spec.path.clone(), tensor);
        }
        match found.into_iter().next() {
            None => Ok(Self {
                path,
                tensors,
                config,
                num_bytes_read: AtomicU64::new(0),
            }),
            Some((name, (_, _, entry))) => Err(ModelError::UnexpectedTensor {
                path,
                name,
                found: entry.shape,
            }),
        }
    }

    /// Returns the sizes of the model.
    pub fn config(&self) -> A {
        self.config
    }

    /// Reads the elements `range` of the parameter at `path` in the module, in row-major order of the module's shape, as 32-bit
    /// floats: the shard of one rank, say. Of a matrix that files have the other way round, it reads a part of each of
    /// its rows there, and at most two rows of the module more than asked for.
    ///
    /// # Errors
    ///
    /// [`ModelError::NoParameter`] for a path or a range that the model has not; if a file cannot be read any more, or has
    /// changed since it was opened.
    pub fn read(&self, path: &str, range: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let stored = self.tensors.get(path);
        let is_inside =
            |stored: &&StoredTensor| range.start <= range.end && range.end <= stored.num_elements();
        let Some(stored) = stored.filter(is_inside) else {
            return Err(ModelError::NoParameter {
                parameter: path.to_owned(),
                range,
                num_elements: stored.map(StoredTensor::num_elements),
            });
        };
        let elements = stored.read(range).map_err(|source| ModelError::File {
            path: self.path.clone(),
            source,
        })?;
        self.num_bytes_read
            .fetch_add(elements.num_bytes, Ordering::Relaxed);
        Ok(elements.values)
    }

    /// Returns the bytes of tensors that were read since it was opened.
    pub fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read.load(Ordering::Relaxed)
    }

    /// Reads the weights into a new model.
    ///
    /// # Errors
    ///
    /// If a file cannot be read any more, or has changed since it was opened.
    pub fn load(&self, device: &Device) -> Result<A::Model, ModelError> {
        let mut model = self.config.blank(device)?;
        let mut tensors = Vec::new();
        for (path, stored) in &self.tensors {
            let values = self.read(path, 0..stored.num_elements())?;
            let bytes = Bytes::from_elems(values);
            let shape = Shape::from(stored.spec.module_shape());
            tensors.push(PackedTensor::new(
                path.clone(),
                DType::F32,
                shape,
                None,
                bytes,
            ));
        }
        let result = model.apply(tensors, None, None, false);
        if let Some(error) = result.errors.first() {
            return Err(store_error(&self.path, error));
        }
        match result.missing.first() {
            None => Ok(model),
            Some(missing) => {
                let problem = format!("parameter {missing:?} is not in the table of the model");
                Err(store_error(&self.path, &problem))
            }
        }
    }
}

impl Gpt {
    /// Writes the weights as safetensors, by the names and in the layout of the model's
    /// [table](GptConfig::parameters), which are those of the PyTorch program.
    ///
    /// The file is written beside its place and renamed into it when complete.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters are not those of its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

impl Llama {
    /// Writes the weights as safetensors, by the names and in the layout of the model's
    /// [table](crate::LlamaConfig::parameters), which are those of Hugging Face's
    /// `LlamaForCausalLM`.
    ///
    /// The file is written beside its place and renamed into it when complete.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters are not those of its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

impl Gpt2 {
    /// Writes the weights as safetensors, by the names and in the layout of the model's
    /// [table](crate::Gpt2Config::parameters), which are those of Hugging Face's `GPT2LMHeadModel`.
    ///
    /// The file is written beside its place and renamed into it when complete.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters are not those of its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

fn save<M: ModuleSnapshot + HasTable>(model: &M, path: &Path) -> Result<(), ModelError> {
    let table = model.table();
    check_module(model, &table, path)?;
    let mut store = SafetensorsStore::from_file(path)
        .with_to_adapter(ToFile::new(table))
        // What readers of Hugging Face's models ask for.
        .metadata("format", "pt")
        .skip_enum_variants(false)
        .overwrite(true);
    model
        .save_into(&mut store)
        .map_err(|error| store_error(path, &error))
}

/// Checks that the module has the parameters of its table, whole, and no others.
fn check_module<M: ModuleSnapshot>(
    model: &M,
    table: &[ParameterSpec],
    path: &Path,
) -> Result<(), ModelError> {
    let mut expected: BTreeMap<&str, Vec<usize>> = table
        .iter()
        .map(|spec| (spec.path.as_str(), spec.module_shape()))
        .collect();
    // Nothing is read: tensors are collected as promises of their bytes.
    for tensor in model.collect(None, None, false) {
        let found = tensor.shape.to_vec();
        if expected.remove(tensor.name.as_str()).as_ref() != Some(&found) {
            return Err(ModelError::UnexpectedParameter {
                path: path.to_owned(),
                parameter: tensor.name,
                found,
            });
        }
    }
    match expected.into_iter().next() {
        None => Ok(()),
        Some((parameter, expected)) => Err(ModelError::MissingParameter {
            path: path.to_owned(),
            parameter: parameter.to_owned(),
            expected,
        }),
    }
}

/// The adapter that gives tensors of a module their name and order of dims in files.
#[derive(Debug, Clone)]
struct ToFile {
    /// The parameters by path.
    table: BTreeMap<String, ParameterSpec>,
}

impl ToFile {
    fn new(table: Vec<ParameterSpec>) -> Self {
        let by_path = table.into_iter().map(|spec| (spec.path.clone(), spec));
        Self {
            table: by_path.collect(),
        }
    }
}

impl ModuleAdapter for ToFile {
    fn adapt(&self, tensor: PackedTensor, _: ModuleContext<'_>) -> PackedTensor {
        match self.table.get(&tensor.name) {
            Some(spec) => adapted(tensor, spec.name.clone(), spec.is_transposed),
            None => tensor,
        }
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

/// Returns the tensor under another name and, if asked for, with its two dims exchanged. Bytes are
/// read and moved only when somebody draws them.
fn adapted(mut tensor: PackedTensor, name: String, transpose: bool) -> PackedTensor {
    if !transpose {
        tensor.name = name;
        return tensor;
    }
    let dtype = tensor.dtype;
    let reversed: Vec<usize> = tensor.shape.iter().rev().copied().collect();
    bridge::map_data(tensor, name, dtype, Shape::from(reversed), transposed)
}

pub(crate) fn transposed(data: TensorData) -> TensorData {
    let dtype: DType = data.dtype();
    Tensor::<2>::from_data(data, (&Device::flex(), dtype))
        .transpose()
        .into_data()
}

fn read_header(path: &Path) -> Result<(OpenedFile, Header), ModelError> {
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    let malformed = |problem| ModelError::MalformedWeights {
        path: path.to_owned(),
        problem,
    };
    // Before opening: opening a pipe would wait for somebody to write to it.
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() {
        return Err(malformed("not a regular file".to_owned()));
    }
    let opened = OpenedFile::of(path).map_err(file_error)?;
    let mut file = File::open(path).map_err(file_error)?;
    let header = Header::read(&mut file, metadata.len())
        .map_err(file_error)?
        .map_err(malformed)?;
    Ok((opened, header))
}

/// Returns a parameter's tensor in a file, if it is what the model has.
fn stored_tensor(
    path: &Path,
    spec: ParameterSpec,
    entry: Option<(OpenedFile, u64, TensorEntry)>,
) -> Result<StoredTensor, ModelError> {
    let path = path.to_owned();
    let Some((file, start, entry)) = entry else {
        return Err(ModelError::MissingTensor {
            path,
            name: spec.name,
            expected: spec.shape,
        });
    };
    if entry.shape != spec.shape {
        return Err(ModelError::WrongShape {
            path,
            name: spec.name,
            expected: spec.shape,
            found: entry.shape,
        });
    }
    match StoredType::named(&entry.dtype) {
        Some(dtype) => Ok(StoredTensor {
            file,
            start: start + entry.start(),
            dtype,
            spec,
        }),
        None => Err(ModelError::WrongDtype {
            path,
            name: spec.name,
            found: entry.dtype,
        }),
    }
}

pub(crate) fn store_error(path: &Path, problem: &impl ToString) -> ModelError {
    ModelError::Store {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}
