//! Conversion of a sharded optimizer's state from and to Burn's record of it, which has whole parameters. Rank 0 holds
//! one whole parameter at a time.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use burn_fsdp_collectives::{BufferPool, FullPart, Part, ProcessGroup, Source};
use burn_fsdp_mesh::Partition;
use burn_fsdp_shard::{LocalPart, LocalTensor, local_ids, local_state};
use burn_pack::{Scalar, Tensor as PackedTensor, Writer};
use serde::{Deserialize, Serialize};

use crate::filed::{Filed, FiledState, FiledTensor};
use crate::groups::Groups;
use crate::notes::exchanged;
use crate::scratch::{Pile, Scratch};
use burn_fsdp_glue::dtype::{burn_dtype, dtype_of, element_of};
use burn_fsdp_glue::error::{CheckpointError, Error, optimizer_error};
use burn_fsdp_glue::optimizer_record::{
    Number, OptimizerParts, RANK_KEY, state_name, with_state_of_file,
};
use burn_fsdp_glue::optimizer_state::{
    Holders, ParameterState, StateTensor, is_elsewhere, not_elementwise, states,
};
use burn_fsdp_glue::piecewise::{lazily_taken, only, without};
use burn_fsdp_glue::snapshot::Elements;

/// A parameter that an optimizer updates in shards.
struct Sharded {
    /// The tensor's id in this rank's optimizer.
    id: u64,
    local: LocalTensor,
}

/// Rank 0's message about the state of a parameter.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) scalars: Vec<(String, Number)>,
    group_path: Option<String>,
    pub(crate) tensors: Vec<StateTensor>,
}

impl Told {
    /// Returns true if the parameter has no state.
    pub(crate) fn is_empty(&self) -> bool {
        self.scalars.is_empty() && self.tensors.is_empty()
    }
}

/// Loads this rank's part of a whole model's optimizer state into the optimizer of its shards of `model`. Rank 0 has
/// that state; if there is none, the optimizer is returned unchanged.
///
/// Rank 0 holds the whole state of one parameter at a time, if the state in `whole` is read on demand. This rank's part
/// passes through a file in a folder in `parent`. This gives each tensor its own memory, which is freed when the
/// optimizer replaces the tensor.
///
/// Collective.
pub(crate) fn divided<M: Module>(
    model: &M,
    bare: ModuleOptimizer,
    whole: Option<ModuleOptimizer>,
    groups: &Groups,
    parent: Option<&Path>,
) -> Result<ModuleOptimizer, Error> {
    let mut whole = whole;
    let mut own = Own {
        parent,
        files: None,
        tensors: Vec::new(),
        scalars: BTreeMap::new(),
        paths: BTreeMap::new(),
    };
    let sharded = sharded(model)?;
    for Sharded { id, local } in &sharded {
        let parts = match whole.take() {
            Some(all) => {
                let parts = OptimizerParts::take(&only(&all, [*id]))?;
                whole = Some(without(all, [*id]));
                Some(parts)
            }
            None => None,
        };
        own.receive(groups, *id, local, parts.as_ref())?;
    }
    if let Some(rest) = whole {
        check_none_left(&rest)?;
    }
    let Some((scratch, _)) = own.files else {
        return Ok(bare);
    };
    let path = scratch.path("states.bpk");
    let mut writer = Writer::new(own.tensors);
    for (name, scalar) in own.scalars {
        writer = writer.with_scalar(&name, scalar);
    }
    for (id, path) in &own.paths {
        writer = writer.with_metadata(id, path);
    }
    let written = writer.write_to_file_in_place(&path);
    written.map_err(optimizer_error)?;
    let optimizer = with_state_of_file(bare, &path)?;
    // Recording a state reads it from the file, which is removed on return.
    for Sharded { id, .. } in &sharded {
        drop(only(&optimizer, [*id]).to_record());
    }
    Ok(optimizer)
}

/// Checks that `rest`, the state that no parameter of the model has taken, is empty.
pub(crate) fn check_none_left(rest: &ModuleOptimizer) -> Result<(), CheckpointError> {
    match OptimizerParts::take(rest)?.tensors.len() {
        0 => Ok(()),
        left => Err(optimizer_error(format!(
            "{left} tensors of its checkpoint belong to parameters that this model does not have"
        ))),
    }
}

/// The state that a rank has received.
struct Own<'a> {
    parent: Option<&'a Path>,
    /// The tensor file and its folder, once rank 0 has announced a state.
    files: Option<(Scratch, Pile)>,
    tensors: Vec<PackedTensor>,
    scalars: BTreeMap<String, Scalar>,
    paths: BTreeMap<String, String>,
}

impl Own<'_> {
    /// Receives this rank's part of the state of one parameter; rank 0 has the whole state.
    ///
    /// Collective.
    fn receive(
        &mut self,
        groups: &Groups,
        id: u64,
        local: &LocalTensor,
        parts: Option<&OptimizerParts>,
    ) -> Result<(), Error> {
        let told = match parts {
            Some(parts) => told(parts, id, &local.path)?,
            None => Told::default(),
        };
        let told = exchanged(&groups.world, "state of a parameter", &told)?.swap_remove(0);
        if told.is_empty() {
            return Ok(());
        }
        let (scratch, pile) = match self.files.take() {
            Some(files) => files,
            None => {
                let scratch = Scratch::new(self.parent)?;
                let pile = scratch.pile("states")?;
                (scratch, pile)
            }
        };
        let (_, pile) = self.files.insert((scratch, pile));
        let is_mine = !is_elsewhere(local);
        let shown = local.shown_shape();
        if is_mine {
            for (field, number) in &told.scalars {
                let scalar = if field == RANK_KEY {
                    Scalar::from(shown.len())
                } else {
                    (*number).into()
                };
                self.scalars.insert(format!("{id}.{field}"), scalar);
            }
            if let Some(path) = told.group_path {
                self.paths.insert(id.to_string(), path);
            }
        }
        for tensor in &told.tensors {
            let is_elementwise = tensor.shape == local.shape;
            let name = state_name(&local.path, &tensor.field);
            if !is_elementwise && Holders::of(local) == Holders::Parts {
                let elements = local.shape.iter().product();
                return Err(not_elementwise(&name, &tensor.shape, elements).into());
            }
            let whole = parts.and_then(|parts| parts.tensor(id, &tensor.field));
            let bytes = received(groups, local, tensor, whole)?;
            if !is_mine {
                continue;
            }
            let shape = if is_elementwise {
                shown.clone()
            } else {
                tensor.shape.clone()
            };
            let dtype = burn_dtype(&name, tensor.dtype)?;
            let bytes = pile.add(bytes.as_bytes())?;
            let name = format!("{id}.{}", tensor.field);
            let packed = PackedTensor::new(name, dtype, shape, Some(id), bytes);
            self.tensors.push(packed);
        }
        Ok(())
    }
}

/// Describes the state of a parameter in rank 0's message.
pub(crate) fn told(parts: &OptimizerParts, id: u64, path: &str) -> Result<Told, CheckpointError> {
    let scalars = parts.scalars_of(id);
    let mut tensors = Vec::new();
    for (field, tensor) in parts.tensors_of(id) {
        tensors.push(StateTensor {
            dtype: dtype_of(&state_name(path, &field), tensor.dtype)?,
            shape: tensor.shape.to_vec(),
            field,
        });
    }
    Ok(Told {
        scalars: scalars
            .map(|(field, scalar)| (field, scalar.into()))
            .collect(),
        group_path: parts.paths.get(&id.to_string()).cloned(),
        tensors,
    })
}

/// Returns this rank's part of a state tensor of parameter `local`; `whole` is the full tensor on rank 0.
///
/// Collective.
fn received(
    groups: &Groups,
    local: &LocalTensor,
    tensor: &StateTensor,
    whole: Option<&PackedTensor>,
) -> Result<Source, CheckpointError> {
    let label = state_name(&local.path, &tensor.field);
    let element = element_of(&label, tensor.dtype)?;
    let bytes = whole.map(|whole| whole.to_bytes().map_err(optimizer_error));
    let source = match bytes.transpose()? {
        Some(bytes) => Source::new(Elements(bytes)),
        None => Source::empty(),
    };
    let partition = match &local.part {
        LocalPart::Shard { partition, .. } => of_state(partition, tensor)?,
        LocalPart::Whole | LocalPart::Own => {
            let len = tensor.num_elements();
            return broadcast(&groups.world, label, source, FullPart::absent(len, element));
        }
    };
    let own = if groups.is_in_first_replica() {
        let elements = partition.len(groups.shards.rank());
        let into = vec![BufferPool::new().take(elements * element.size())];
        let part = Part::new(source, partition, element);
        let received = groups
            .shards
            .scatter(label.clone(), Vec::new(), 0, vec![part], into)?;
        let own = received.buffers.into_iter().next();
        own.map_or_else(Source::empty, Source::new)
    } else {
        Source::empty()
    };
    match &groups.replicas {
        Some(replicas) => {
            let len = partition.len(groups.shards.rank());
            broadcast(replicas, label, own, FullPart::absent(len, element))
        }
        None => Ok(own),
    }
}

/// Broadcasts `own` from rank 0 of `group`, and returns it. `absent` describes it on the other ranks.
///
/// Collective.
pub(crate) fn broadcast(
    group: &ProcessGroup,
    label: String,
    own: Source,
    absent: FullPart,
) -> Result<Source, CheckpointError> {
    if group.rank() == 0 {
        // The source of a broadcast receives nothing, because it has the data.
        let part = FullPart::new(own.clone(), absent.element);
        group.broadcast(label, Vec::new(), 0, vec![part], Vec::new())?;
        return Ok(own);
    }
    let into = vec![BufferPool::new().take(absent.num_elements * absent.element.size())];
    let received = group.broadcast(label, Vec::new(), 0, vec![absent], into)?;
    let received = received.buffers.into_iter().next();
    Ok(received.map_or_else(Source::empty, Source::new))
}

/// Adds the whole state of a sharded optimizer to a file on rank 0. Returns the state there, to be read from the file,
/// and `None` on the other ranks. The state is keyed by the parameters' ids in the model's record, for programs that
/// load both.
///
/// Collective: rank 0 has a file, and the others none.
pub(crate) fn filed<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    groups: &Groups,
    mut pile: Option<&mut Pile>,
) -> Result<Option<Filed>, Error> {
    let ids = local_ids(model)?;
    let numbers: Vec<u64> = ids.iter().map(|ids| ids.id.val()).collect();
    let parts = lazily_taken(optimizer, &numbers)?;
    let locals = by_path(model)?;
    let mut states = states(model, &parts, &ids, &locals)?;
    let mut whole = Filed::default();
    for ids in ids {
        let local = &locals[&ids.path];
        let state = states.remove(&ids.path).unwrap_or_default();
        if state.is_empty() {
            continue;
        }
        let ParameterState { kept, tensors } = state;
        let mut state = FiledState {
            dims: local.shape.len(),
            group_path: kept.group_path,
            scalars: Vec::new(),
            tensors: Vec::new(),
        };
        let scalars = kept.scalars.into_iter();
        let scalars = scalars.map(|(field, number)| (field, number.into()));
        state.scalars.extend(scalars);
        for tensor in tensors {
            let own = parts.tensor(ids.id.val(), &tensor.field);
            let gathered = gathered(groups, local, &tensor, own)?;
            let Some((pile, gathered)) = pile.as_deref_mut().zip(gathered) else {
                continue;
            };
            let shape = match Holders::of(local) {
                Holders::Parts => local.shape.clone(),
                Holders::All | Holders::Owner(_) => tensor.shape,
            };
            state.tensors.push(FiledTensor {
                dtype: burn_dtype(&tensor.field, tensor.dtype)?,
                field: tensor.field,
                shape,
                bytes: pile.add(gathered.as_bytes())?,
            });
        }
        whole.insert(ids.recorded.val(), state);
    }
    Ok(pile.map(|_| whole))
}

/// Returns, on rank 0, a whole tensor of the state of the parameter `local`; `own` is this rank's part.
///
/// Collective.
fn gathered(
    groups: &Groups,
    local: &LocalTensor,
    tensor: &StateTensor,
    own: Option<&PackedTensor>,
) -> Result<Option<Source>, CheckpointError> {
    let own = own.map(|own| own.to_bytes().map_err(optimizer_error));
    let own = own
        .transpose()?
        .map(|bytes: Bytes| Source::new(Elements(bytes)));
    let LocalPart::Shard { partition, .. } = &local.part else {
        return Ok(own.filter(|_| groups.world.rank() == 0));
    };
    // The replicas have the same state.
    if !groups.is_in_first_replica() {
        return Ok(None);
    }
    let label = state_name(&local.path, &tensor.field);
    let element = element_of(&label, tensor.dtype)?;
    let elements = local.elements.len() / local.dtype.size();
    if Holders::of(local) == Holders::Parts && tensor.num_elements() != elements {
        return Err(not_elementwise(&label, &tensor.shape, elements));
    }
    let partition = of_state(partition, tensor)?;
    // A separate pool: the world's pool is for the buffers of steps, whose sizes recur.
    let group = &groups.shards;
    let into = match group.rank() {
        0 => vec![BufferPool::new().take(partition.num_elements() * element.size())],
        _ => Vec::new(),
    };
    let part = Part::new(own.unwrap_or_else(Source::empty), partition, element);
    let received = group.gather(label, Vec::new(), 0, vec![part], into)?;
    Ok(received.buffers.into_iter().next().map(Source::new))
}

/// Returns the partition of a tensor of a parameter's state. It is the parameter's partition, except that an owner has
/// all of the state, which may have any shape.
fn of_state(partition: &Partition, tensor: &StateTensor) -> Result<Partition, CheckpointError> {
    Ok(match partition.sole_owner() {
        Some(owner) => {
            let num_shards = partition.num_shards();
            Partition::one_owner(tensor.num_elements(), num_shards, owner)?
        }
        None => *partition,
    })
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
