//! Recording an optimizer's state piece by piece. Burn makes two copies of the state for a record, as tensors and as
//! bytes, so recording everything at once needs twice its memory.

use std::sync::Arc;

use burn::module::{ParamGroup, ParamId};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn_pack::{Error as PackError, Tensor as PackedTensor};

use crate::error::CheckpointError;
use crate::optimizer_record::OptimizerParts;
use crate::optimizer_record::deferred;

/// Number of pieces into which a state is split. Each piece costs a pass over all parameters.
const PIECES: usize = 32;

/// Returns the optimizer with the state of only the parameters `ids`.
pub fn only(optimizer: &ModuleOptimizer, ids: impl IntoIterator<Item = u64>) -> ModuleOptimizer {
    let others = ParamGroup::all().exclude(group_of(ids));
    // Adding a group removes the state of its parameters; the optimizer of the group does not matter.
    let any = SgdConfig::new().build();
    optimizer.clone().with_group(others, any, None)
}

/// Returns the optimizer without the state of the parameters `ids`.
pub fn without(optimizer: ModuleOptimizer, ids: impl IntoIterator<Item = u64>) -> ModuleOptimizer {
    optimizer.with_group(group_of(ids), SgdConfig::new().build(), None)
}

fn group_of(ids: impl IntoIterator<Item = u64>) -> ParamGroup {
    ParamGroup::from_ids(ids.into_iter().map(ParamId::from).collect())
}

/// Splits the record of an optimizer as [`OptimizerParts::take`] does, a few of the parameters `ids` at a time. Memory
/// holds the whole record, and a second copy of one piece.
pub(crate) fn taken_in_pieces(
    optimizer: &ModuleOptimizer,
    ids: &[u64],
) -> Result<OptimizerParts, CheckpointError> {
    let mut parts = OptimizerParts::default();
    let mut rest = optimizer.clone();
    for piece in ids.chunks(ids.len().div_ceil(PIECES).max(1)) {
        parts.extend(OptimizerParts::take(&only(&rest, piece.iter().copied()))?);
        rest = without(rest, piece.iter().copied());
    }
    // State of parameters that were not requested; the caller identifies them.
    parts.extend(OptimizerParts::take(&rest)?);
    Ok(parts)
}

/// Splits the record of an optimizer as [`OptimizerParts::take`] does, but reads the tensors of the parameters `ids`
/// only on demand.
pub fn lazily_taken(
    optimizer: &ModuleOptimizer,
    ids: &[u64],
) -> Result<OptimizerParts, CheckpointError> {
    let mut parts = OptimizerParts::default();
    // All tensors share one clone, because it has an entry for each parameter.
    let shared = Arc::new(optimizer.clone());
    for id in ids {
        let mut own = OptimizerParts::take(&only(optimizer, [*id]))?;
        let tensors = own.tensors.iter();
        own.tensors = tensors.map(|tensor| lazy(&shared, *id, tensor)).collect();
        parts.extend(own);
    }
    // State of parameters that were not requested; the caller identifies them.
    let rest = without(optimizer.clone(), ids.iter().copied());
    parts.extend(OptimizerParts::take(&rest)?);
    Ok(parts)
}

/// Returns a state tensor of the parameter `id`, read on demand.
fn lazy(optimizer: &Arc<ModuleOptimizer>, id: u64, tensor: &PackedTensor) -> PackedTensor {
    let (optimizer, name) = (optimizer.clone(), tensor.name.clone());
    let read = move || {
        let own = OptimizerParts::take(&only(&optimizer, [id]));
        let own = own.map_err(|error| PackError::IoError(error.to_string()))?;
        let found = own.tensors.into_iter().find(|tensor| tensor.name == name);
        let found = found.ok_or_else(|| PackError::TensorNotFound(name.clone()))?;
        found.into_bytes()
    };
    deferred(tensor, read)
}
