//! Weights from files. Each rank reads only the weights of its shards.

use std::path::Path;

use burn::tensor::TensorData;
use burn_fsdp::internals::compile::ShardSpec;
use burn_fsdp::internals::mesh::Region;
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

/// Reads this rank's shards of a sharded model. The adapters' factors stay unchanged.
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

/// Reads this rank's part of a tensor of a compiled step. Returns `None` for a tensor that no file has: an adapter's
/// factor, or any tensor if there is no file.
pub(crate) fn read_part<A: Architecture>(
    file: Option<&WeightsFile<A>>,
    part: &ShardSpec<'_>,
) -> Result<Option<TensorData>, RankError> {
    let path = &part.whole.path;
    let Some(file) = file.filter(|_| !is_factor(path)) else {
        return Ok(None);
    };
    let Region::Flat(range) = &part.region else {
        unreachable!(
            "the command divides parameters into flat shards, but these are {}",
            part.region
        );
    };
    let values = file.read(path, range.clone())?;
    Ok(Some(TensorData::new(values, part.shape.clone())))
}
