//! Initial weights for training, written without building the whole model.

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, TensorData};

use crate::weight_writer::write_weights;
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
    write_weights(config, path, value)
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
