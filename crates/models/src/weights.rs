//! Weights on disk, for both models.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use burn::store::burn_pack::Tensor as PackedTensor;
use burn::store::{
    ModuleAdapter, ModuleContext, ModuleSnapshot, ModuleStore, SafetensorsStore, bridge,
};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

use crate::header::{Header, TensorEntry};
use crate::table::HasTable;
use crate::weight_folder::WeightFolder;
use crate::{Architecture, Gpt, GptConfig, Llama, ModelError, ParameterSpec};

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
    /// The path itself, or the files of the folder there.
    files: Vec<PathBuf>,
    config: A,
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
            let header = read_header(file)?;
            if let Some(folder) = &folder {
                folder.check(file, header.tensors.keys())?;
            }
            found.extend(header.tensors);
        }
        for spec in config.parameters() {
            let entry = found.remove(&spec.name);
            check_tensor(&path, spec, entry)?;
        }
        match found.into_iter().next() {
            None => Ok(Self {
                path,
                files,
                config,
            }),
            Some((name, entry)) => Err(ModelError::UnexpectedTensor {
                path,
                name,
                found: entry.shape,
            }),
        }
    }

    /// Reads the weights into a new model.
    ///
    /// # Errors
    ///
    /// If a file cannot be read any more, or has changed since it was opened.
    pub fn load(&self, device: &Device) -> Result<A::Model, ModelError> {
        // Every parameter is replaced before it is first used, so that the seed
        // does not matter and no random number is ever drawn.
        let mut model = self.config.init(device, 0)?;
        let mut tensors = Vec::new();
        let mut stored = BTreeMap::new();
        for file in &self.files {
            let mut store = SafetensorsStore::from_file(file);
            let all = store
                .get_all_tensors()
                .map_err(|error| store_error(file, &error))?;
            stored.extend(
                all.iter()
                    .map(|(name, tensor)| (name.clone(), tensor.clone())),
            );
        }
        for spec in self.config.parameters() {
            let Some(tensor) = stored.remove(&spec.name) else {
                let problem = format!("tensor {} is gone since the file was opened", spec.name);
                return Err(store_error(&self.path, &problem));
            };
            tensors.push(adapted(tensor, spec.path, spec.is_transposed));
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

fn transposed(data: TensorData) -> TensorData {
    let dtype: DType = data.dtype();
    Tensor::<2>::from_data(data, (&Device::flex(), dtype))
        .transpose()
        .into_data()
}

fn read_header(path: &Path) -> Result<Header, ModelError> {
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
    let mut file = File::open(path).map_err(file_error)?;
    Header::read(&mut file, metadata.len())
        .map_err(file_error)?
        .map_err(malformed)
}

fn check_tensor(
    path: &Path,
    spec: ParameterSpec,
    entry: Option<TensorEntry>,
) -> Result<(), ModelError> {
    let path = path.to_owned();
    let ParameterSpec { name, shape, .. } = spec;
    match entry {
        None => Err(ModelError::MissingTensor {
            path,
            name,
            expected: shape,
        }),
        Some(entry) if entry.shape != shape => Err(ModelError::WrongShape {
            path,
            name,
            expected: shape,
            found: entry.shape,
        }),
        Some(entry) if entry.dtype != "F32" => Err(ModelError::WrongDtype {
            path,
            name,
            found: entry.dtype,
        }),
        Some(_) => Ok(()),
    }
}

fn store_error(path: &Path, problem: &impl ToString) -> ModelError {
    ModelError::Store {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}
