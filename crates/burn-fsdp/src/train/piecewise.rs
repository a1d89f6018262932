//! The state of an optimizer, parameter by parameter: all at once is as large as two models.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{ParamGroup, ParamId};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn_pack::{Error as PackError, Tensor as PackedTensor};

use crate::error::CheckpointError;
use crate::optimizer_record::OptimizerParts;

/// Returns the optimizer with the state of one parameter.
pub(crate) fn only(optimizer: &ModuleOptimizer, id: u64) -> ModuleOptimizer {
    let others = ParamGroup::all().exclude(ParamGroup::from_ids(vec![ParamId::from(id)]));
    // A group that is added takes away the state of its parameters; what it would step them by plays no part.
    let any = SgdConfig::new().build();
    optimizer.clone().with_group(others, any, None)
}

/// Returns the optimizer without the state of these parameters.
pub(crate) fn without(
    optimizer: ModuleOptimizer,
    ids: impl IntoIterator<Item = u64>,
) -> ModuleOptimizer {
    let ids = ids.into_iter().map(ParamId::from);
    let group = ParamGroup::from_ids(ids.collect());
    optimizer.with_group(group, SgdConfig::new().build(), None)
}

/// Takes the record of an optimizer apart as [`OptimizerParts::take`] does, with tensors of the parameters `ids` that are read
/// when they are asked for.
pub(crate) fn lazily_taken(
    optimizer: &ModuleOptimizer,
    ids: &[u64],
) -> Result<OptimizerParts, CheckpointError> {
    let mut parts = OptimizerParts {
        scalars: BTreeMap::new(),
        paths: BTreeMap::new(),
        tensors: Vec::new(),
    };
    // One for all tensors: it has an entry for each parameter.
    let shared = Arc::new(optimizer.clone());
    for id in ids {
        let own = OptimizerParts::take(&only(optimizer, *id))?;
        parts.scalars.extend(own.scalars);
        parts.paths.extend(own.paths);
        let tensors = own.tensors.into_iter();
        parts
            .tensors
            .extend(tensors.map(|tensor| lazy(&shared, *id, &tensor)));
    }
    // Of parameters that are not asked for: whoever asked finds out what they are.
    let rest = OptimizerParts::take(&without(optimizer.clone(), ids.iter().copied()))?;
    parts.scalars.extend(rest.scalars);
    parts.paths.extend(rest.paths);
    parts.tensors.extend(rest.tensors);
    Ok(parts)
}

/// Returns a tensor of the state of the parameter `id` that is read when it is asked for.
fn lazy(optimizer: &Arc<ModuleOptimizer>, id: u64, tensor: &PackedTensor) -> PackedTensor {
    let (optimizer, name) = (optimizer.clone(), tensor.name.clone());
    let read = move || {
        let own = OptimizerParts::take(&only(&optimizer, id));
        let own = own.map_err(|error| PackError::IoError(error.to_string()))?;
        let found = own.tensors.into_iter().find(|tensor| tensor.name == name);
        let found = found.ok_or_else(|| PackError::TensorNotFound(name.clone()))?;
        found.into_bytes()
    };
    PackedTensor::deferred(
        tensor.name.clone(),
        tensor.dtype,
        tensor.shape.clone(),
        tensor.param_id,
        tensor.byte_len(),
        read,
    )
}
