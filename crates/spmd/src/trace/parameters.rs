//! What a module consists of, without any of its values.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device};

use super::capture::record;
use super::module::{leaves, trained, with_fakes};
use crate::Error;

/// A tensor of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSpec {
    /// Dotted path.
    pub path: Arc<str>,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Whether it is a float parameter that requires a gradient.
    pub is_trained: bool,
}

/// The tensors of the module that `init` makes, in the order in which it is visited; a tensor that
/// occurs under several paths once, under the first. No weight is initialised.
///
/// # Errors
///
/// [`Error::Uncapturable`] if `init` reads the value of a tensor.
pub fn parameters<M: Module>(init: impl FnOnce(&Device) -> M) -> Result<Vec<ParameterSpec>, Error> {
    let recording = record("the module", |device, _| {
        let tracked = device.clone().autodiff();
        let model = with_fakes(init(&tracked), device, &tracked);
        let trained = trained(&model);
        let mut specs: Vec<(Option<burn_ir::TensorId>, ParameterSpec)> = Vec::new();
        for (leaf, is_trained) in leaves(&model, None).into_iter().zip(trained) {
            let id = leaf.captured.as_ref().map(|captured| captured.id);
            if id.is_some() && specs.iter().any(|(other, _)| *other == id) {
                continue;
            }
            let spec = ParameterSpec {
                path: leaf.path,
                shape: leaf.shape,
                dtype: leaf.dtype,
                is_trained,
            };
            specs.push((id, spec));
        }
        Ok(specs)
    })?;
    Ok(recording.result.into_iter().map(|(_, spec)| spec).collect())
}
