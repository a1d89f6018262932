use std::fs::File;
use std::path::{Path, PathBuf};

use burn::store::{BurnToPyTorchAdapter, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::Device;

use crate::header::{Header, TensorEntry};
use crate::{Gpt, GptConfig, ModelError, ParameterSpec};

/// A safetensors file that holds the weights of one model, all of them and
/// nothing else, in PyTorch's names and layout.
///
/// There is no way to make one but [`open`](Self::open), which reads the file's
/// header and compares it with the model, so that [`load`](Self::load) has
/// nothing left to complain about but the disk.
#[derive(Debug)]
pub struct WeightsFile {
    path: PathBuf,
    config: GptConfig,
}

impl WeightsFile {
    /// Check that a file holds the weights of the configured model.
    ///
    /// The file is not trusted: its header is read with bounds on every number.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not well formed, or lacks a tensor of the
    /// model, has one more, or has one of another shape or type.
    pub fn open(path: impl Into<PathBuf>, config: GptConfig) -> Result<Self, ModelError> {
        config.validate()?;
        let path = path.into();
        let mut header = read_header(&path)?;
        for spec in config.parameters() {
            let entry = header.tensors.remove(&spec.name);
            check_tensor(&path, spec, entry)?;
        }
        match header.tensors.into_iter().next() {
            None => Ok(Self { path, config }),
            Some((name, entry)) => Err(ModelError::UnexpectedTensor {
                path,
                name,
                found: entry.shape,
            }),
        }
    }

    /// Read the weights into a new model.
    ///
    /// # Errors
    ///
    /// If the file cannot be read any more, or has changed since it was opened.
    pub fn load(&self, device: &Device) -> Result<Gpt, ModelError> {
        // Every parameter is replaced before it is first used, so that the seed
        // does not matter and no random number is ever drawn.
        let mut model = self.config.init(device, 0)?;
        let mut store = SafetensorsStore::from_file(&self.path)
            .with_from_adapter(PyTorchToBurnAdapter)
            .validate(true);
        model
            .load_from(&mut store)
            .map_err(|error| store_error(&self.path, &error))?;
        Ok(model)
    }
}

impl Gpt {
    /// Write the weights as safetensors, in PyTorch's names and layout.
    ///
    /// The file is written beside its place and renamed into it when complete.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        let path = path.as_ref();
        let mut store = SafetensorsStore::from_file(path)
            .with_to_adapter(BurnToPyTorchAdapter)
            .overwrite(true);
        self.save_into(&mut store)
            .map_err(|error| store_error(path, &error))
    }
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
    let ParameterSpec { name, shape } = spec;
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
