//! The tensors of a module by path, shape and type, without their values.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device};

use super::capture::{Defaults, record_with};
use super::module::{Stored, leaves, running, trained, with_fakes, with_marks};
use crate::error::Error;

/// A tensor of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterSpec {
    /// Path of the tensor in the module, with dots between names.
    pub path: Arc<str>,
    /// The other paths of a trained parameter that several fields share.
    pub tied: Vec<Arc<str>>,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// True for a float parameter that requires a gradient.
    pub is_trained: bool,
    /// True for a tensor that is not a parameter: a running statistic, or a tensor that is not a float. Such a tensor
    /// is never sharded.
    pub is_buffer: bool,
    /// True for a tensor that the module of an [override](crate::Override) added to the step's tensors.
    pub is_added: bool,
}

/// Returns the tensors of the module that `init` creates, in visiting order, without computing any weight. A running
/// statistic under several paths is listed once, under the first path. So is a trained parameter that several fields
/// share (clones with the same id).
///
/// # Errors
///
/// [`Error::Uncapturable`] if `init` reads the value of a tensor; [`Error::Tied`] if two trained parameters with the
/// same id have different shapes.
pub fn parameters<M: Module>(init: impl FnOnce(&Device) -> M) -> Result<Vec<ParameterSpec>, Error> {
    let found = parameters_with(None, init)?.into_iter();
    Ok(found.map(|(_, spec)| spec).collect())
}

/// Returns the tensors as [`parameters`] does, for a device's default types, with their ids in the module that `init`
/// creates.
pub(crate) fn parameters_with<M: Module>(
    defaults: Option<Defaults>,
    init: impl FnOnce(&Device) -> M,
) -> Result<Vec<(ParamId, ParameterSpec)>, Error> {
    let recording = record_with("the module", defaults, |device, _| {
        let tracked = device.clone().autodiff();
        let model = with_fakes(init(&tracked), device, &tracked, &Stored::new());
        let trained = trained(&model);
        let found = leaves(&model, None);
        let running = running(&with_marks(model, &tracked));
        let mut owners: BTreeMap<_, Arc<str>> = BTreeMap::new();
        let mut seen = BTreeMap::new();
        let mut specs: Vec<(ParamId, ParameterSpec)> = Vec::with_capacity(found.len());
        for ((leaf, is_trained), is_running) in found.into_iter().zip(trained).zip(running) {
            if let Some(captured) = &leaf.captured {
                let first = *seen.entry(captured.id).or_insert(specs.len());
                if let Some((_, first)) = specs.get_mut(first) {
                    first.tied.extend(is_trained.then_some(leaf.path));
                    continue;
                }
            }
            // A frozen copy keeps its own values, so it is not a tie.
            if is_trained && let Some(first) = owners.insert(leaf.id, leaf.path.clone()) {
                return Err(Error::Tied {
                    first: first.to_string(),
                    second: leaf.path.to_string(),
                    problem: "but have different shapes; store one tensor, and transpose its value where it is used",
                });
            }
            let spec = ParameterSpec {
                path: leaf.path,
                tied: Vec::new(),
                shape: leaf.shape,
                dtype: leaf.dtype,
                is_trained,
                is_buffer: is_running || !leaf.is_float,
                is_added: false,
            };
            specs.push((leaf.id, spec));
        }
        Ok(specs)
    })?;
    Ok(recording.result)
}
