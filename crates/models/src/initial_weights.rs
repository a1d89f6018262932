//! Initial weights for training, written without building the whole model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::store::burn_pack::{Error as PackError, Tensor as PackedTensor};
use burn::store::{ModuleAdapter, ModuleContext};
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use crate::saving::{transposed, write};
use crate::{Architecture, ModelError, ParameterSpec, WeightsFile};

/// Writes the initial weights for training as safetensors, with the names and layout of the model's
/// [table](Architecture::parameters).
///
/// The weights are read from the file or folder `from`, or drawn with `seed` if it is `None`. Only one parameter at a
/// time is in memory. The output is a temporary file in the same folder until it is complete, and is then renamed to
/// `path`.
///
/// # Errors
///
/// If the configuration is not valid, if `from` does not belong to the model or cannot be read, or if the file cannot
/// be written.
pub fn write_initial_weights<A: Architecture>(
    config: A,
    seed: u64,
    from: Option<&Path>,
    path: &Path,
) -> Result<(), ModelError> {
    let file = from
        .map(|from| WeightsFile::open(from, config))
        .transpose()?;
    let value = move |spec: &ParameterSpec| match &file {
        Some(file) => {
            let shape = spec.module_shape();
            let values = file.read(&spec.path, 0..shape.iter().product())?;
            Ok(TensorData::new(values, shape))
        }
        None => drawn(config, seed, &spec.path),
    };
    let table = config.parameters().into_iter();
    let adapter = Given {
        table: Arc::new(table.map(|spec| (spec.path.clone(), spec)).collect()),
        value: Arc::new(value),
    };
    let shapes = config.blank(&Device::flex())?.map(&mut StandIns);
    write(&shapes, adapter, path)
}

/// Draws the initial values of the parameter at `path`, and of no other.
fn drawn<A: Architecture>(config: A, seed: u64, path: &str) -> Result<TensorData, ModelError> {
    struct One<'a>(&'a str, Vec<String>, Option<TensorData>);
    impl ModuleVisitor for One<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.1.join(".") == self.0 {
                self.2 = Some(param.val().into_data());
            }
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.1.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.1.pop();
        }
    }
    let mut one = One(path, Vec::new(), None);
    config.init(&Device::flex(), seed)?.visit(&mut one);
    one.2.ok_or_else(|| ModelError::NoParameter {
        parameter: path.to_owned(),
        range: 0..0,
        num_elements: None,
    })
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
