//! The state of an optimizer of shards, from and to Burn's record of it, which is of whole parameters.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Shape};
use burn_fsdp_collectives::{ElementType, Part, ProcessGroup, Source};
use burn_fsdp_shard::{LocalPart, LocalTensor, local_ids, local_state};
use burn_pack::{Scalar, Tensor as PackedTensor};

use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_record::{OptimizerParts, RANK_KEY, packed, state_name, with_state};
use crate::restore::range_of;
use crate::snapshot::Elements;

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
    for Sharded { id, local, .. } in sharded(model)? {
        for (field, scalar) in whole.scalars_of(id) {
            // Shards are of one dimension.
            let scalar = match field == RANK_KEY {
                true => Scalar::UInt(1),
                false => scalar,
            };
            scalars.insert(format!("{id}.{field}"), scalar);
        }
        for (field, tensor) in whole.tensors_of(id) {
            taken += 1;
            let elements: usize = local.shape.iter().product();
            if tensor.shape.num_elements() != elements {
                return Err(optimizer_error(format!(
                    "`{}` has {} elements, the parameter {elements}; only element-wise state can be divided",
                    state_name(&local.path, &field),
                    tensor.shape.num_elements()
                )));
            }
            let size = tensor.dtype.size();
            let range = range_of(&local);
            let bytes = tensor.to_bytes().map_err(optimizer_error)?;
            let bytes = bytes[range.start * size..range.end * size].to_vec();
            let bytes = Bytes::from_bytes_vec(bytes);
            let name = tensor.name.clone();
            own.push(PackedTensor::new(
                name,
                tensor.dtype,
                [range.len()],
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
    with_state(bare, packed(own, scalars, &whole.paths)?)
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
    let mut taken = 0;
    for Sharded {
        id,
        recorded,
        local,
    } in sharded(model)?
    {
        for (field, scalar) in parts.scalars_of(id) {
            let scalar = match field == RANK_KEY {
                true => Scalar::UInt(local.shape.len() as u64),
                false => scalar,
            };
            scalars.insert(format!("{recorded}.{field}"), scalar);
        }
        if let Some(path) = parts.paths.get(&id.to_string()) {
            paths.insert(recorded.to_string(), path.clone());
        }
        let mut tensors: Vec<_> = parts.tensors_of(id).collect();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        taken += tensors.len();
        for (field, tensor) in tensors {
            let label = state_name(&local.path, &field);
            let bytes = tensor.to_bytes().map_err(optimizer_error)?;
            let Some(bytes) = gathered(world, label, &local, tensor.dtype, bytes)? else {
                continue;
            };
            let name = format!("{recorded}.{field}");
            let shape = Shape::from(local.shape.clone());
            let tensor = PackedTensor::new(name, tensor.dtype, shape, Some(recorded), bytes);
            whole.push(tensor);
        }
    }
    if taken != parts.tensors.len() {
        return Err(optimizer_error(format!(
            "{} tensors belong to parameters that are not sharded, and are each rank's own",
            parts.tensors.len() - taken
        )));
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
    /// The id that it has in records of the model.
    recorded: u64,
    local: LocalTensor,
}

/// Returns the parameters that an optimizer steps.
fn sharded<M: Module>(model: &M) -> Result<Vec<Sharded>, CheckpointError> {
    let state = local_state(model)?.into_iter();
    let mut state: BTreeMap<_, _> = state.map(|local| (local.path.clone(), local)).collect();
    let ids = local_ids(model)?.into_iter();
    let found = ids.filter_map(|ids| {
        Some(Sharded {
            id: ids.id.val(),
            recorded: ids.recorded.val(),
            local: state.remove(&ids.path)?,
        })
    });
    Ok(found.collect())
}

/// Returns the whole of what each rank has a shard of, on rank 0.
fn gathered(
    world: &ProcessGroup,
    label: String,
    local: &LocalTensor,
    dtype: DType,
    bytes: Bytes,
) -> Result<Option<Bytes>, CheckpointError> {
    let LocalPart::Shard { partition, .. } = &local.part else {
        return Ok((world.rank() == 0).then_some(bytes));
    };
    let element = match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 | DType::Flex32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::BF16,
        other => return Err(optimizer_error(format!("`{label}` is of type {other:?}"))),
    };
    let into = match world.rank() {
        0 => vec![world.pool().take(partition.num_elements() * element.size())],
        _ => Vec::new(),
    };
    let part = Part::new(Source::new(Elements(bytes)), *partition, element);
    let received = world.gather(label, Vec::new(), 0, vec![part], into)?;
    let whole = received.buffers.into_iter().next();
    Ok(whole.map(|buffer| Bytes::from_bytes_vec(buffer.as_ref().to_vec())))
}
