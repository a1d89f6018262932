//! The state of an optimizer for the unsharded model: gathered from shards, and split into them again.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, Shape};
use burn_fsdp_collectives::{BufferPool, ElementType, Part, ProcessGroup, Source};
use burn_fsdp_mesh::Partition;
use burn_fsdp_shard::{
    LocalPart, LocalTensor, check_elementwise_once, local_ids, local_state, shard_groups,
};
use burn_pack::{Scalar, Tensor as PackedTensor};

use crate::dtype::{burn_dtype, element_of};
use crate::error::{CheckpointError, optimizer_error};
use crate::optimizer_cut::{WholeState, cut_optimizer};
use crate::optimizer_record::{
    OptimizerParts, RANK_KEY, check_taken, emptied, packed, state_name, with_state,
};
use crate::optimizer_state::{Holders, StateTensor, kept_of, not_elementwise, states, tensors_of};
use crate::piecewise::taken_in_pieces;

/// Gathers the whole optimizer state of a sharded model. Ranks that `keep` it get an optimizer for the plain copy of
/// the model that [`unsharded`](burn_fsdp_shard::unsharded) returns, with the copy's ids; the others get
/// `None`. To continue training with the copy, call `train` on it first, which adds autodiff. The optimizer's record
/// equals the record of an unsharded training run. The optimizer's groups by ids still contain the ids of the sharded
/// model.
///
/// Ranks that do not `keep` the state hold one whole tensor at a time, in addition to their own state.
///
/// Collective over all ranks of the model, between steps: one all-gather for each state of a sharded parameter. The
/// optimizers of all ranks must have taken the same steps.
///
/// # Errors
///
/// An optimizer that computes with whole tensors but has shards; a state that does not belong to the model's
/// parameters; a model with low-rank adapters, which the plain copy lacks; a failed collective.
pub fn unsharded_optimizer<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    keep: bool,
) -> Result<Option<ModuleOptimizer>, CheckpointError> {
    check_elementwise_once(model, optimizer)?;
    let ids = local_ids(model)?;
    let locals: BTreeMap<_, _> = local_state(model)?
        .into_iter()
        .map(|local| (local.path.clone(), local))
        .collect();
    if let Some(factor) = locals.values().find(|local| local.adapter_scale.is_some()) {
        return Err(optimizer_error(format!(
            "`{}` is a factor of a low-rank adapter, which the plain copy of the model has merged into its weights, \
             so there is no parameter for its state; save a step, which contains it",
            factor.path
        )));
    }
    let numbers: Vec<u64> = ids.iter().map(|id| id.id.val()).collect();
    let parts = taken_in_pieces(optimizer, &numbers)?;
    let mut states = states(model, &parts, &ids, &locals)?;
    check_taken(optimizer, &parts)?;
    let groups: HashMap<_, _> = shard_groups(model).into_iter().collect();
    let (mut tensors, mut scalars, mut paths) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for id in ids {
        let (local, state) = (
            &locals[&id.path],
            states.remove(&id.path).unwrap_or_default(),
        );
        let number = id.recorded.val();
        if keep && !state.is_empty() {
            let dims = Scalar::from(local.shape.len());
            scalars.insert(format!("{number}.{RANK_KEY}"), dims);
        }
        for tensor in &state.tensors {
            let own = match parts.tensor(id.id.val(), &tensor.field) {
                Some(own) => own.to_bytes().map_err(optimizer_error)?,
                None => Bytes::from_bytes_vec(Vec::new()),
            };
            let whole = Whole::of(local, tensor)?;
            let bytes = whole.gathered(own, &groups[&id.path])?;
            if keep {
                let name = format!("{number}.{}", tensor.field);
                let shape = Shape::from(whole.shape);
                tensors.push(PackedTensor::new(
                    name,
                    whole.dtype,
                    shape,
                    Some(number),
                    bytes,
                ));
            }
        }
        if keep {
            for (field, value) in state.kept.scalars {
                scalars.insert(format!("{number}.{field}"), value.into());
            }
            if let Some(group) = state.kept.group_path {
                paths.insert(number.to_string(), group);
            }
        }
    }
    if !keep {
        return Ok(None);
    }
    let record = packed(tensors, scalars, &paths)?;
    Ok(Some(with_state(emptied(optimizer), record)?))
}

/// A whole state, and its partition among ranks.
struct Whole {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    element: ElementType,
    /// `None` if every rank has the whole state.
    partition: Option<Partition>,
}

impl Whole {
    fn of(local: &LocalTensor, tensor: &StateTensor) -> Result<Self, CheckpointError> {
        let name = state_name(&local.path, &tensor.field);
        let dtype = burn_dtype(&name, tensor.dtype)?;
        let divided = match &local.part {
            LocalPart::Shard { partition, .. } => Some(*partition),
            LocalPart::Whole | LocalPart::Own => None,
        };
        let (shape, partition) = match Holders::of(local) {
            Holders::Parts => {
                let elements = local.elements.len() / local.dtype.size();
                if tensor.num_elements() != elements {
                    return Err(not_elementwise(&name, &tensor.shape, elements));
                }
                (local.shape.clone(), divided)
            }
            Holders::All => (tensor.shape.clone(), None),
            Holders::Owner(owner) => {
                let shards = divided.map_or(1, |partition| partition.num_shards());
                let elements = tensor.num_elements();
                let partition = Partition::one_owner(elements, shards, owner);
                (
                    tensor.shape.clone(),
                    Some(partition.map_err(optimizer_error)?),
                )
            }
        };
        Ok(Self {
            element: element_of(&name, tensor.dtype)?,
            name,
            shape,
            dtype,
            partition,
        })
    }

    /// Returns the bytes of the whole state; `own` is this rank's part. Collective if the state is divided among ranks.
    fn gathered(&self, own: Bytes, group: &ProcessGroup) -> Result<Bytes, CheckpointError> {
        let Some(partition) = self.partition else {
            return Ok(own);
        };
        let part = Part::new(Source::new(own.to_vec()), partition, self.element);
        let into = BufferPool::new().take(partition.num_elements() * self.element.size());
        let label = format!("{} whole state", self.name);
        let received = group.all_gather(label, Vec::new(), vec![part], vec![into])?;
        let buffer = received.buffers.first();
        let bytes = buffer.map(|buffer| buffer.as_ref().to_vec());
        Ok(Bytes::from_bytes_vec(bytes.unwrap_or_default()))
    }
}

/// Returns an optimizer configured like `whole`, with this rank's part of its states, for a sharded model. `whole` is
/// the optimizer of the model before it was sharded, or of a plain copy, as [`unsharded_optimizer`] returns it.
///
/// Not collective. Every rank that holds parameters also holds the whole states during the call. If they do not fit,
/// use [steps](burn_fsdp_checkpoint).
///
/// # Errors
///
/// An optimizer that computes with whole tensors but would get shards; a state that does not belong to the model's
/// parameters, or that cannot be divided.
pub fn shard_optimizer<M: Module>(
    model: &M,
    whole: &ModuleOptimizer,
) -> Result<ModuleOptimizer, CheckpointError> {
    let empty = emptied(whole);
    check_elementwise_once(model, &empty)?;
    let parts = OptimizerParts::take(whole)?;
    let mut kept = BTreeMap::new();
    let mut states = Vec::new();
    let mut bytes = HashMap::new();
    for id in local_ids(model)? {
        let numbers = [id.id.val(), id.recorded.val()];
        if numbers
            .iter()
            .all(|number| parts.tensors_of(*number).next().is_some())
        {
            return Err(optimizer_error(format!(
                "it has two states of `{}`: one of the sharded model and one of a plain copy; give an optimizer \
                 that has trained only one of them",
                id.path
            )));
        }
        for number in numbers {
            let own = kept_of(&parts, number);
            if !own.scalars.is_empty() || own.group_path.is_some() {
                kept.insert(id.path.clone(), own);
            }
            for (field, tensor) in tensors_of(&parts, number) {
                let name = state_name(&id.path, &field);
                bytes.insert(name.clone(), tensor);
                states.push(WholeState {
                    name,
                    path: id.path.clone(),
                    field,
                    shape: tensor.shape.to_vec(),
                    dtype: tensor.dtype,
                });
            }
        }
    }
    if let Some(other) = parts
        .tensors
        .len()
        .checked_sub(states.len())
        .filter(|&n| n > 0)
    {
        return Err(optimizer_error(format!(
            "{other} of its tensors have ids of no parameter of the model; give the optimizer of the module that \
             was sharded, or of the copy that `unsharded` returned"
        )));
    }
    let read = |state: &WholeState, range: std::ops::Range<usize>| {
        let all = bytes[&state.name].to_bytes().map_err(optimizer_error)?;
        let size = state.dtype.size();
        Ok(all[range.start * size..range.end * size].to_vec())
    };
    cut_optimizer(model, &local_state(model)?, empty, states, kept, read)
}
