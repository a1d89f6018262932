//! Weights from files. Each rank reads only the weights of its shards.

use std::path::Path;

use burn::tensor::TensorData;
use burn_fsdp::internals::compile::ShardSpec;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::sharding::InitialPart;
use burn_fsdp::state::load_local_state;
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, WeightsFile};

use crate::adapters::{Factors, initial_magnitudes, is_factor};
use crate::error::{InputError, RankError};

/// Checks that there is something at the path of `--init`.
pub(crate) fn check_exists(path: &Path) -> Result<(), InputError> {
    match path.metadata() {
        Ok(_) => Ok(()),
        Err(error) => Err(InputError::NoInit {
            path: path.to_owned(),
            error,
        }),
    }
}

/// Checks that a file or folder has the weights of a model.
pub(crate) fn check(model: &ModelConfig, path: &Path) -> Result<(), ModelError> {
    match *model {
        ModelConfig::Gpt(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
        ModelConfig::Llama(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
        ModelConfig::Gpt2(sizes) => WeightsFile::open(path, sizes).map(|_| ()),
    }
}

/// Reads this rank's part of a parameter that is being sharded. Returns `None` for an adapter's parameter that is not in
/// `factors`, which starts from rank 0's value, or from the norms of the weights that adapters are trained on.
pub(crate) fn read_initial<A: Architecture>(
    weights: &WeightsFile<A>,
    factors: Option<&Factors>,
    part: &InitialPart<'_>,
) -> Result<Option<Vec<u8>>, RankError> {
    let range = part.range.clone();
    let values = match (is_factor(part.path), factors) {
        (false, _) => Some(weights.read(part.path, range)?),
        (true, Some(factors)) => factors.part(part.path, range),
        (true, None) => None,
    };
    Ok(values.map(|values| values.into_iter().flat_map(f32::to_ne_bytes).collect()))
}

/// Reads this rank's shards of a sharded model. The adapters' factors stay unchanged, unless `factors` has them.
/// Magnitudes become the norms of the weights, for which each rank reads whole matrices, one at a time.
pub(crate) fn read_shards<A: Architecture>(
    sizes: A,
    path: &Path,
    factors: Option<&Factors>,
    model: A::Model,
) -> Result<A::Model, RankError> {
    let weights = WeightsFile::open(path, sizes)?;
    load_local_state(model, |tensor| {
        let (path, range) = (&tensor.path, tensor.range());
        let values = match (is_factor(path), factors) {
            (false, _) => Some(weights.read(path, range)?),
            (true, Some(factors)) => factors.part(path, range),
            (true, None) => initial_magnitudes(&weights, path, range)?,
        };
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_ne_bytes).collect();
        Ok::<_, RankError>(values.map(bytes))
    })
}

/// Reads this rank's part of a tensor of a compiled step. Returns `None` for a tensor that no file has: an adapter's
/// factor that is not in `factors`, or any tensor if there is no file. Magnitudes are as in [`read_shards`].
pub(crate) fn read_part<A: Architecture>(
    file: Option<&WeightsFile<A>>,
    factors: Option<&Factors>,
    part: &ShardSpec<'_>,
) -> Result<Option<TensorData>, RankError> {
    let path = &part.whole.path;
    let Region::Flat(range) = &part.region else {
        unreachable!(
            "the command divides parameters into flat shards, but these are {}",
            part.region
        );
    };
    let range = range.clone();
    let values = match (file, is_factor(path), factors) {
        (_, true, Some(factors)) => factors.part(path, range),
        (Some(file), true, None) => initial_magnitudes(file, path, range)?,
        (Some(file), false, _) => Some(file.read(path, range)?),
        (None, ..) => None,
    };
    Ok(values.map(|values| TensorData::new(values, part.shape.clone())))
}

/// Reads a region of a parameter.
pub(crate) fn read_region<A: Architecture>(
    weights: &WeightsFile<A>,
    path: &str,
    region: &Region,
) -> Result<Vec<f32>, RankError> {
    match region {
        Region::Flat(range) => Ok(weights.read(path, range.clone())?),
        Region::Box { offsets, sizes } => {
            let ([0, left], [_, columns]) = (&offsets[..], &sizes[..]) else {
                unreachable!("the command divides matrices only, but this is {region}");
            };
            Ok(weights.read_columns(path, *left..left + columns)?)
        }
    }
}
