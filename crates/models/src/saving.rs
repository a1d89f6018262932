//! Weights of models, written as safetensors.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::path::Path;

use burn::store::burn_pack::Tensor as PackedTensor;
use burn::store::{
    ModuleAdapter, ModuleContext, ModuleSnapshot, SafetensorsStore, SafetensorsStoreError, bridge,
};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use tempfile::Builder;

use crate::error::store_error;
use crate::table::HasTable;
use crate::{Gpt, Gpt2, Llama, ModelError, ParameterSpec};

impl Gpt {
    /// Writes the weights as safetensors, with the names and layout of the model's
    /// [table](crate::GptConfig::parameters).
    ///
    /// The weights are written to a temporary file in the same folder, which is renamed when complete. The file gets
    /// the permissions of the file that it replaces, or the default permissions of new files.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters do not match its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

impl Llama {
    /// Writes the weights as safetensors, with the names and layout of the model's
    /// [table](crate::LlamaConfig::parameters), which match the family's class in Hugging Face's transformers.
    ///
    /// The weights are written to a temporary file in the same folder, which is renamed when complete. The file gets
    /// the permissions of the file that it replaces, or the default permissions of new files.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters do not match its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

impl Gpt2 {
    /// Writes the weights as safetensors, with the names and layout of the model's
    /// [table](crate::Gpt2Config::parameters), which match Hugging Face's `GPT2LMHeadModel`.
    ///
    /// The weights are written to a temporary file in the same folder, which is renamed when complete. The file gets
    /// the permissions of the file that it replaces, or the default permissions of new files.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or if the model's parameters do not match its table.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), ModelError> {
        save(self, path.as_ref())
    }
}

fn save<M: ModuleSnapshot + HasTable>(model: &M, path: &Path) -> Result<(), ModelError> {
    let table = model.table();
    check_module(model, &table, path)?;
    write(model, ToFile::new(table), path)
}

/// Writes a module's parameters through an adapter. They are written to a temporary file in the same folder, which is
/// renamed when it is complete. The file gets the permissions of the file that it replaces, or the default permissions
/// of new files.
pub(crate) fn write<M: ModuleSnapshot>(
    model: &M,
    adapter: impl ModuleAdapter + 'static,
    path: &Path,
) -> Result<(), ModelError> {
    let mut store = SafetensorsStore::from_file(path)
        .with_to_adapter(adapter)
        // The store writes entries in random order, but equal weights must become equal files. Readers of Hugging Face's
        // models require this entry.
        .clear_metadata()
        .metadata("format", "pt")
        .skip_enum_variants(false)
        .overwrite(true);
    let permissions = permissions(path).map_err(|source| file_error(path, source))?;
    model
        .save_into(&mut store)
        .map_err(|error| saving_error(path, &error))?;
    give(path, permissions).map_err(|source| file_error(path, source))
}

/// Returns the error of a store that could not write, with the system's own error if there is one.
fn saving_error(path: &Path, error: &SafetensorsStoreError) -> ModelError {
    let of_system = match error {
        SafetensorsStoreError::Safetensors(error) => {
            error.source().and_then(<dyn Error>::downcast_ref)
        }
        SafetensorsStoreError::Io(error) => Some(error),
        _ => None,
    };
    match of_system {
        Some(source) => {
            let source: &io::Error = source;
            file_error(path, io::Error::new(source.kind(), source.to_string()))
        }
        None => store_error(path, error),
    }
}

/// Returns the permissions for a file at `path`: the replaced file's, or the default for new files.
fn permissions(path: &Path) -> io::Result<Permissions> {
    match path.metadata() {
        Ok(replaced) => Ok(replaced.permissions()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| *parent != Path::new(""));
            let mut builder = Builder::new();
            builder.prefix(".").suffix(".part");
            #[cfg(unix)]
            {
                // The process's umask applies as for any file.
                use std::os::unix::fs::PermissionsExt;
                builder.permissions(Permissions::from_mode(0o666));
            }
            let probe = builder.tempfile_in(parent.unwrap_or(Path::new(".")))?;
            Ok(probe.as_file().metadata()?.permissions())
        }
        Err(error) => Err(error),
    }
}

/// Sets the permissions of a file, because safetensors files are created readable for their owner only.
fn give(path: &Path, permissions: Permissions) -> io::Result<()> {
    if path.metadata()?.permissions() == permissions {
        return Ok(());
    }
    fs::set_permissions(path, permissions)
}

fn file_error(path: &Path, source: io::Error) -> ModelError {
    ModelError::File {
        path: path.to_owned(),
        source,
    }
}

/// Checks that the module has exactly the parameters of its table, each of them whole.
fn check_module<M: ModuleSnapshot>(
    model: &M,
    table: &[ParameterSpec],
    path: &Path,
) -> Result<(), ModelError> {
    let mut expected: BTreeMap<&str, Vec<usize>> = table
        .iter()
        .map(|spec| (spec.path.as_str(), spec.module_shape()))
        .collect();
    // Nothing is read: the collected tensors provide their bytes later.
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

/// The adapter that gives a module's tensors their names and dim order in files.
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

/// Returns the tensor under another name and, with `transpose`, with its two dims swapped. Bytes are read and
/// transposed only on demand.
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
