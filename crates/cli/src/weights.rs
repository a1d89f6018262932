//! Weights of files, of which each rank reads those of its shards.

use std::path::Path;

use burn::tensor::Device;
use burn_fsdp::state::load_local_state;
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, WeightsFile};

use crate::adapters::is_factor;
use crate::error::RankError;

/// Checks that a file or folder has the weights of a model.
pub(crate) fn check(model: &ModelConfig, path: &Path) -> Result<(), ModelError> {
    match *model {
        ModelConfig::Gpt(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
        ModelConfig::Llama(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
        ModelConfig::Gpt2(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
    }
}

/// Makes a whole model on a device, lazily where its weights are drawn.
pub(crate) fn whole<A: Architecture>(
    sizes: A,
    file: Option<&Path>,
    device: &Device,
    seed: u64,
) -> Result<A::Model, ModelError> {
    match file {
        Some(path) => WeightsFile::open(path, sizes)?.load(device),
        None => sizes.init(device, seed),
    }
}

/// Reads this rank's shards of a sharded model. The factors of adapters stay as they are.
pub(crate) fn read_shards<A: Architecture>(
    sizes: A,
    path: &Path,
    model: A::Model,
) -> Result<A::Model, RankError> {
    let weights = WeightsFile::open(path, sizes)?;
    load_local_state(model, |tensor| {
        if is_factor(&tensor.path) {
            return Ok(None);
        }
        let values = weights.read(&tensor.path, tensor.range())?;
        Ok::<_, RankError>(Some(
            values.into_iter().flat_map(f32::to_ne_bytes).collect(),
        ))
    })
}
