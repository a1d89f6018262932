//! The state of an optimizer of shards, from and to Burn's record of it, which is of whole parameters.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Bytes;
use burn_fsdp_checkpoint::Dtype;
use burn_fsdp_collectives::{ElementType, Part, ProcessGroup, Source};
use burn_fsdp_mesh::Partition;
use burn_fsdp_shard::{LocalPart, LocalTensor, local_ids, local_state};
use burn_pack::{Scalar, Tensor as PackedTensor};

use crate::dtype::burn_dtype;
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{OptimizerParts, RANK_KEY, packed, state_name};
use crate::optimizer_state::{Holders, StateTensor, is_elsewhere, not_elementwise, states};
use crate::snapshot::Elements;
use crate::typed_state::with_state;

/// Gives an optimizer that this rank's shards of `model` are stepped with its part of `whole`, the state of an optimizer
/// of the whole model.
pub(crate) fn divided<M: Module>(
    model: &M,
    bare: ModuleOptimizer,
    whole: &OptimizerParts,
) -> Result<ModuleOptimizer, CheckpointError> {
    if whole.scalars.is_empty() && whole.tensors.is_empty() {
        return Ok(bare);
    }
    let mut own = Vec::new();
    let mut scalars = BTreeMap::new();
    let mut taken = 0;
    for Sharded { id, local } in sharded(model)? {
        let shown = local.shown_shape();
        let is_mine = !is_elsewhere(&local);
        for (field, scalar) in whole.scalars_of(id).filter(|_| is_mine) {
            let scalar = match field == RANK_KEY {
                true => Scalar::from(shown.len()),
                false => scalar,
            };
            scalars.insert(format!("{id}.{field}"), scalar);
        }
        for (field, tensor) in whole.tensors_of(id) {
            taken += 1;
            if !is_mine {
                continue;
            }
            let is_elementwise = tensor.shape[..] == local.shape[..];
            if !is_elementwise && Holders::of(&local) == Holders::Parts {
                let name = state_name(&local.path, &field);
                let shape = tensor.shape.to_vec();
                return Err(not_elementwise(&name, &shape, local.shape.iter().product()));
            }
            let (range, shape) = match is_elementwise {
                true => (local.range(), shown.clone()),
                false => (0..tensor.shape.num_elements(), tensor.shape.to_vec()),
            };
            let size = tensor.dtype.size();
            let bytes = tensor.to_bytes().map_err(optimizer_error)?;
            let bytes = bytes[range.start * size..range.end * size].to_vec();
            let bytes = Bytes::from_bytes_vec(bytes);
            let name = tensor.name.clone();
            own.push(PackedTensor::new(
                name,
                tensor.dtype,
                shape,
                Some(id),
                bytes,
            ));
        }
    }
    if taken != whole.tensors.len() {
        return Err(optimizer_error(format!(
            "{} tensors of its checkpoint belong to parameters that this model has not",
            whole.tensors.len() - taken
        )));
    }
    let parts = OptimizerParts {
        tensors: own,
        scalars,
        paths: whole.paths.clone(),
    };
    with_state(bare, parts)
}

/// Returns, on rank 0, an optimizer with the state of the whole model: each rank has that of its shards. It knows parameters
/// by the ids that they have in the record of the model, so that it is for whoever loads both.
///
/// Collective.
pub(crate) fn joined<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    world: &ProcessGroup,
) -> Result<Option<ModuleOptimizer>, CheckpointError> {
    let parts = OptimizerParts::take(optimizer)?;
    let (mut whole, mut scalars, mut paths) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    let ids = local_ids(model)?;
    let locals = by_path(model)?;
    let mut states = states(model, &parts, &ids, &locals)?;
    for ids in ids {
        let recorded = ids.recorded.val();
        let local = &locals[&ids.path];
        let state = states.remove(&ids.path).unwrap_or_default();
        if !state.is_empty() {
            let dims = Scalar::from(local.shape.len());
            scalars.insert(format!("{recorded}.{RANK_KEY}"), dims);
        }
        for (field, number) in state.kept.scalars {
            scalars.insert(format!("{recorded}.{field}"), number.into());
        }
        if let Some(path) = state.kept.group_path {
            paths.insert(recorded.to_string(), path);
        }
        for tensor in state.tensors {
            let own = parts.tensor(ids.id.val(), &tensor.field);
            let Some(bytes) = gathered(world, local, &tensor, own)? else {
                continue;
            };
            let shape = match Holders::of(local) {
                Holders::Parts => local.shape.clone(),
                Holders::All | Holders::Owner(_) => tensor.shape,
            };
            let name = format!("{recorded}.{}", tensor.field);
            let dtype = burn_dtype(&name, tensor.dtype)?;
            whole.push(PackedTensor::new(name, dtype, shape, Some(recorded), bytes));
        }
    }
    if world.rank() > 0 {
        return Ok(None);
    }
    let bytes = packed(whole, scalars, &paths)?;
    let record = OptimizerRecord::from_bytes(bytes).map_err(optimizer_error)?;
    Ok(Some(optimizer.clone().load_record(record)))
}

/// A parameter that an optimizer steps, in shards.
struct Sharded {
    /// The id by which this rank's optimizer knows it.
    id: u64,
    local: LocalTensor,
}

/// Returns the parameters that an optimizer steps.
fn sharded<M: Module>(model: &M) -> Result<Vec<Sharded>, CheckpointError> {
    let mut state = by_path(model)?;
    let ids = local_ids(model)?.into_iter();
    let found = ids.filter_map(|ids| {
        Some(Sharded {
            id: ids.id.val(),
            local: state.remove(&ids.path)?,
        })
    });
    Ok(found.collect())
}

fn by_path<M: Module>(model: &M) -> Result<BTreeMap<String, LocalTensor>, CheckpointError> {
    let state = local_state(model)?.into_iter();
    Ok(state.map(|local| (local.path.clone(), local)).collect())
}

/// Returns, on rank 0, the whole of a tensor of the state of the parameter `local`, of which this rank has `own`.
fn gathered(
    world: &ProcessGroup,
    local: &LocalTensor,
    tensor: &StateTensor,
    own: Option<&PackedTensor>,
) -> Result<Option<Bytes>, CheckpointError> {
    let bytes = own.map(|own| own.to_bytes().map_err(optimizer_error));
    let bytes = bytes.transpose()?;
    let LocalPart::Shard { partition, .. } = &local.part else {
        return Ok(bytes.filter(|_| world.rank() == 0));
    };
    let label = state_name(&local.path, &tensor.field);
    let element = match tensor.dtype {
        Dtype::F64 => ElementType::F64,
        Dtype::F32 => ElementType::F32,
        Dtype::F16 => ElementType::F16,
        Dtype::BF16 => ElementType::BF16,
        other => return Err(optimizer_error(format!("`{label}` is of type {other}"))),
    };
    let elements = local.elements.len() / local.dtype.size();
    if Holders::of(local) == Holders::Parts && tensor.num_elements() != elements {
        return Err(not_elementwise(&label, &tensor.shape, elements));
    }
    let partition = match partition.sole_owner() {
        // A state of what one rank owns is of any shape.
        Some(owner) => {
            let num_shards = partition.num_shards();
            Partition::one_owner(tensor.num_elements(), num_shards, owner)?
        }
        None => *partition,
    };
    let into = match world.rank() {
        0 => vec![world.pool().take(partition.num_elements() * element.size())],
        _ => Vec::new(),
    };
    let source = match bytes {
        Some(bytes) => Source::new(Elements(bytes)),
        None => Source::empty(),
    };
    let part = Part::new(source, partition, element);
    let received = world.gather(label, Vec::new(), 0, vec![part], into)?;
    let whole = received.buffers.into_iter().next();
    Ok(whole.map(|buffer| Bytes::from_bytes_vec(buffer.as_ref().to_vec())))
}
