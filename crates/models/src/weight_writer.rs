//! Weights in a file, written without building the whole model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::store::burn_pack::{Error as PackError, Tensor as PackedTensor};
use burn::store::{ModuleAdapter, ModuleContext};
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use crate::saving::{transposed, write};
use crate::{Architecture, ModelError, ParameterSpec};

/// Writes the parameters of a model as 32-bit safetensors, with the names and layout of the model's
/// [table](Architecture::parameters). `value` returns the values of a parameter in the shape that it has in the module.
///
/// Only one parameter at a time is in memory. The output is a temporary file in the same folder until it is complete,
/// and is then renamed to `path`.
///
/// # Errors
///
/// If the configuration is not valid, if the file cannot be written, or the errors of `value`.
pub fn write_weights<A: Architecture>(
    config: A,
    path: &Path,
    value: impl Fn(&ParameterSpec) -> Result<TensorData, ModelError> + Send + Sync + 'static,
) -> Result<(), ModelError> {
    let table = config.parameters().into_iter();
    let adapter = Given {
        table: Arc::new(table.map(|spec| (spec.path.clone(), spec)).collect()),
        value: Arc::new(value),
    };
    let shapes = config.blank(&Device::flex())?.map(&mut StandIns);
    write(&shapes, adapter, path)
}

/// A mapper that replaces each parameter by a stand-in of the same shape that stores a single element.
struct StandIns;

impl ModuleMapper for StandIns {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let one = Tensor::<D>::zeros([1; D], &param.lazy_device());
        Param::initialized(param.id, one.expand(param.lazy_shape()))
    }
}

/// A function that returns the value of a parameter.
type Value = dyn Fn(&ParameterSpec) -> Result<TensorData, ModelError> + Send + Sync;

/// The adapter that provides parameters with their names and dim order in files, and computes their values when they
/// are written.
#[derive(Clone)]
struct Given {
    /// The parameters by path.
    table: Arc<BTreeMap<String, ParameterSpec>>,
    value: Arc<Value>,
}

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given").finish_non_exhaustive()
    }
}

impl ModuleAdapter for Given {
    fn adapt(&self, tensor: PackedTensor, _: ModuleContext<'_>) -> PackedTensor {
        let Some(spec) = self.table.get(&tensor.name).cloned() else {
            return tensor;
        };
        let value = self.value.clone();
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        let num_bytes = shape.iter().product::<usize>() * size_of::<f32>();
        PackedTensor::deferred(name, DType::F32, shape, None, num_bytes, move || {
            let data = value(&spec).map_err(|error| PackError::IoError(error.to_string()))?;
            let data = if spec.is_transposed {
                transposed(data)
            } else {
                data
            };
            Ok(Bytes::from_bytes_vec(data.as_bytes().to_vec()))
        })
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}
