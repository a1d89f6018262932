//! The model that generates: its configuration, and the weights of its files.

use std::path::{Path, PathBuf};

use burn_fsdp::internals::checkpoint::{Dtype, ExpectedTensor, Extra, Step, TensorKind};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::sharding::InitialPart;
use burn_fsdp_models::{Architecture, ModelConfig, WeightsFile};

use crate::adapters::error::AdapterError;
use crate::adapters::is_factor;
use crate::error::{InputError, RankError};
use crate::weights;

/// Reads this rank's part of a parameter from a folder. Adapters' factors come from the step.
pub(super) fn of_file<A: Architecture>(
    weights: &WeightsFile<A>,
    part: &InitialPart<'_>,
) -> Result<Option<Vec<u8>>, RankError> {
    if is_factor(part.path) {
        return Ok(None);
    }
    let values = weights.read(part.path, part.range.clone())?;
    Ok(Some(
        values.into_iter().flat_map(f32::to_ne_bytes).collect(),
    ))
}

/// Reads this rank's part of a parameter from a step.
pub(super) fn of_step(step: &Step, part: &InitialPart<'_>) -> Result<Option<Vec<u8>>, RankError> {
    let region = Region::Flat(part.range.clone());
    step_bytes(step, part.path, part.shape, &region).map(Some)
}

/// Reads a region of a parameter from a step.
pub(super) fn step_region(
    step: &Step,
    path: &str,
    shape: &[usize],
    region: &Region,
) -> Result<Vec<f32>, RankError> {
    let bytes = step_bytes(step, path, shape, region)?;
    let (values, _) = bytes.as_chunks();
    Ok(values.iter().copied().map(f32::from_ne_bytes).collect())
}

fn step_bytes(
    step: &Step,
    path: &str,
    shape: &[usize],
    region: &Region,
) -> Result<Vec<u8>, RankError> {
    let expected = ExpectedTensor {
        name: path.to_owned(),
        shape: shape.to_vec(),
        dtype: Some(Dtype::F32),
    };
    let read = || {
        step.compare(&[expected], |_| false, Extra::Ignore)?;
        step.read(path, region)
    };
    read().map_err(|error| unread(step, error))
}

pub(super) fn unread(step: &Step, error: impl Into<RankError>) -> RankError {
    RankError::Restore {
        path: step.path().to_owned(),
        source: Box::new(error.into()),
    }
}

/// Returns the model of a Hugging Face folder, which must have the weights.
pub(in crate::steps) fn model_of_folder(folder: &Path) -> Result<ModelConfig, InputError> {
    let model = ModelConfig::from_hugging_face(folder)?;
    weights::check(&model, folder)?;
    Ok(model)
}

/// Returns the base model of a step's adapters, from its folder.
pub(in crate::steps) fn adapted_model(
    step: &Step,
    has_adapters: bool,
    folder: &Path,
) -> Result<ModelConfig, InputError> {
    if !has_adapters {
        return Err(InputError::Excludes {
            first: "--init",
            second: "a step of a whole model",
            reason: "the step contains the weights",
        });
    }
    let (model, saved) = (model_of_folder(folder)?, sizes_of(step)?);
    if model == saved {
        Ok(model)
    } else {
        Err(InputError::other_model(step, &model, Some(&saved)))
    }
}

/// Returns the configuration in the index, if the step's tensors match that model.
///
/// The index may come from anyone, and its configuration may describe a model of any size. The size of the tensors is
/// bounded by the files, so it is compared before a model is created.
pub(super) fn whole_model(step: &Step, has_adapters: bool) -> Result<ModelConfig, InputError> {
    let unknown = |problem: String| unknown(step.path(), problem);
    if has_adapters {
        let path = step.path().to_owned();
        return Err(AdapterError::Alone { path }.into());
    }
    let model = sizes_of(step)?;
    step.check_sizes()?;
    let tensors = step.index().tensors.iter();
    let parameters: Vec<_> = tensors
        .filter(|tensor| tensor.kind == TensorKind::Parameter)
        .collect();
    let elements: usize = parameters.iter().map(|tensor| tensor.num_elements()).sum();
    // Compare the number of elements first: it bounds the number of parameters.
    if elements != model.num_params() || parameters.len() != model.parameters()?.len() {
        return Err(unknown(format!(
            "its model would have {} parameters, but {elements} in {} tensors are saved",
            model.num_params(),
            parameters.len()
        )));
    }
    Ok(model)
}

fn sizes_of(step: &Step) -> Result<ModelConfig, InputError> {
    let model = serde_json::from_value::<ModelConfig>(step.index().model.clone());
    let model = model.map_err(|error| unknown(step.path(), error.to_string()))?;
    model.validate()?;
    Ok(model)
}

pub(super) fn unknown(path: &Path, problem: String) -> InputError {
    let path = PathBuf::from(path);
    InputError::UnknownModel { path, problem }
}
