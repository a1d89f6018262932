//! The part of a module that one rank holds, as bytes for checkpoints.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_fsdp_collectives::{Partition, Source};
use burn_fsdp_tensors as tensors;

use crate::convert;
use crate::error::Error;
use crate::files;
use crate::inspect::{self, Member};
use crate::parameter::identity::counterpart;
use crate::parameter::mailbox;
use crate::path::{self, Location};
use crate::slot::MAX_DIMS;
use crate::state::tensors::{Held, all};
use crate::state::unpacked;
use crate::thrown::catch;

/// A tensor of a module, and this rank's part of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalTensor {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub path: String,
    /// The other paths of a sharded parameter that several fields share.
    pub tied: Vec<String>,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Element type as it is stored.
    pub dtype: DType,
    /// The kind of the tensor, and the part of it that this rank holds.
    pub part: LocalPart,
    /// For a factor of a [LoRA adapter](crate::ShardPolicy::lora): the scale of the factors' product, alpha / rank.
    pub adapter_scale: Option<f64>,
    /// The elements that this rank holds, in row-major order and native byte order. On the CPU backend they are read in
    /// place, except those of a [base in fewer bits](crate::ShardPolicy::base_in), which are unpacked when their bytes
    /// are first read. Later changes to the module do not affect them.
    pub elements: Source,
}

/// The part of a tensor that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalPart {
    /// A range of the flat elements of a sharded parameter; everything or nothing if it has a [sole
    /// owner](Partition::sole_owner).
    Shard {
        /// The range of flat elements that this rank holds.
        range: Range<usize>,
        /// The partition of the parameter among all ranks of the shard axis.
        partition: Partition,
    },
    /// A parameter that is whole on every rank.
    Whole,
    /// A tensor that no unit manages: a running state, or a parameter that is integer, boolean, empty or ignored. Each
    /// rank has its own value.
    Own,
}

/// Returns the tensors of a sharded module, in module order, with this rank's part of each. Nothing is communicated,
/// and on the CPU backend nothing is copied. A shared parameter appears once, under the path of its first field.
///
/// Each rank returns its own running states; call [`sync_buffers`](crate::sync_buffers) first to make them equal.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Collective`] if ranks compare bytes and an element is corrupted.
pub fn local_state<M: Module>(module: &M) -> Result<Vec<LocalTensor>, Error> {
    let root = inspect::root_of(module)?;
    let (tied, managed): (Vec<_>, Vec<_>) = inspect::fields(module)
        .into_iter()
        .partition(|(_, member)| member.is_tied);
    let managed: HashMap<_, _> = managed.into_iter().collect();
    for member in managed.values() {
        member.generation.check(member.index)?;
    }
    let tensors = all(module, &root).into_iter().map(|tensor| {
        let whole_or_own = if managed.contains_key(&tensor.path) {
            LocalPart::Whole
        } else {
            LocalPart::Own
        };
        let key = managed.get(&tensor.path).map(Member::key);
        let others = tied.iter().filter(|(_, other)| Some(other.key()) == key);
        let mut adapter_scale = None;
        let (part, elements) = match tensor.held {
            Held::Sharded(member) => {
                let slot = member.slot();
                adapter_scale = member.generation.unit.adapter_scale(member.index);
                let rank = member.generation.unit.groups.shard.rank();
                let part = if slot.is_gathered() {
                    LocalPart::Shard {
                        range: slot.held_range(rank),
                        partition: slot.partition,
                    }
                } else {
                    LocalPart::Whole
                };
                (part, unpacked::source(&member.generation, member.index))
            }
            Held::Here(flat) => (whole_or_own, tensors::source(*flat, None)),
            Held::Read(elements) => (whole_or_own, elements),
        };
        LocalTensor {
            tied: others.map(|(path, _)| path.clone()).collect(),
            path: tensor.path,
            shape: tensor.shape,
            dtype: tensor.dtype,
            part,
            adapter_scale,
            elements,
        }
    });
    Ok(tensors.collect())
}

/// The ids of a sharded parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalId {
    /// Path in the module.
    pub path: String,
    /// The id of the parameter before it was sharded, or the id from a record that was loaded later.
    pub id: ParamId,
    /// The parameter's id in records of the module, which is its stand-in's id.
    pub recorded: ParamId,
}

/// Returns the ids of the sharded parameters of a module, in module order.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn local_ids<M: Module>(module: &M) -> Result<Vec<LocalId>, Error> {
    inspect::root_of(module)?;
    let places = inspect::places(module).into_iter();
    let ids = places.map(|(path, member)| LocalId {
        path,
        id: member.id,
        recorded: counterpart(member.id),
    });
    Ok(ids.collect())
}

/// Replaces this rank's part of a sharded module. `read` receives each tensor as in [`local_state`], with its current
/// elements, and returns new bytes, or `None` to leave it unchanged.
///
/// Everything is read before anything is replaced, so an error changes no copy of the module.
///
/// Not collective. All ranks must replace the same values: if one fails and continues with the unchanged module, the
/// others must not use the new values either.
///
/// # Errors
///
/// Errors of `read`; [`Error::NotSharded`]; [`Error::LocalLength`] for a different number of bytes.
pub fn load_local_state<M: Module, E: From<Error>>(
    module: M,
    mut read: impl FnMut(&LocalTensor) -> Result<Option<Vec<u8>>, E>,
) -> Result<M, E> {
    let mut values = HashMap::new();
    let members: HashMap<_, _> = inspect::places(&module).into_iter().collect();
    for tensor in local_state(&module)? {
        let Some(bytes) = read(&tensor)? else {
            continue;
        };
        let expected = tensor.elements.len();
        if bytes.len() != expected {
            let path = tensor.path;
            let got = bytes.len();
            return Err(E::from(Error::LocalLength {
                path,
                expected,
                got,
            }));
        }
        let (shape, dtype) = (tensor.held_shape(), tensor.dtype);
        let mut holder = members.get(&tensor.path).into_iter();
        // A base in fewer bits is packed before it is written.
        let holder = holder.find(|member| member.slot().quantized().is_none());
        let in_file = holder.map(|member| {
            let unit = &member.generation.unit;
            unit.mapped(member.index, files::SHARD, &bytes)
        });
        let in_file = in_file.transpose().map_err(Error::from)?.flatten();
        let data = match in_file {
            Some(mapped) => tensors::data(mapped, shape, dtype),
            None => TensorData::from_bytes_vec(bytes, shape, dtype),
        };
        values.insert(tensor.path, data);
    }
    Ok(catch(|| {
        path::map(module, &mut PutBack { members, values })
    })?)
}

impl LocalTensor {
    /// Returns this rank's range of the whole tensor's flat elements, in row-major order: the part to read from a file.
    pub fn range(&self) -> Range<usize> {
        match &self.part {
            LocalPart::Shard { range, .. } => range.clone(),
            LocalPart::Whole | LocalPart::Own => 0..self.shape.iter().product(),
        }
    }

    /// Returns the shape that optimizers see. It is flat if this rank holds a shard, and has the tensor's number of
    /// dims, all of size 0, if another rank [owns](crate::ShardPolicy::one_owner) the parameter. Otherwise it is the
    /// tensor's own shape.
    pub fn shown_shape(&self) -> Vec<usize> {
        let too_many = self.shape.len() > MAX_DIMS;
        match &self.part {
            LocalPart::Own => self.shape.clone(),
            LocalPart::Whole if too_many => vec![self.shape.iter().product()],
            LocalPart::Whole => self.shape.clone(),
            LocalPart::Shard { range, partition } => match partition.sole_owner() {
                None => vec![range.len()],
                Some(_) if range.is_empty() => vec![0; self.shape.len()],
                Some(_) => self.shape.clone(),
            },
        }
    }

    /// Returns the shape of the elements that this rank holds: flat for a parameter that a unit manages.
    fn held_shape(&self) -> Vec<usize> {
        match self.part {
            LocalPart::Own => self.shape.clone(),
            _ => vec![self.elements.len() / self.dtype.size()],
        }
    }
}

/// A mapper that replaces tensors by the new ones that were read.
struct PutBack {
    members: HashMap<String, Member>,
    values: HashMap<String, TensorData>,
}

impl path::Mapper for PutBack {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = place.path();
        let Some(data) = self.values.remove(&path) else {
            return param;
        };
        match self.members.remove(&path) {
            Some(member) => {
                let slot = member.slot();
                let device = member.generation.value(member.index).device();
                let shard = Tensor::from_data(data, (&device, slot.elements.stored.dtype));
                mailbox::replace(&member.generation.unit, member.index, shard);
                param
            }
            None => param.map(|old| convert::in_place_of(&old, data)),
        }
    }

    fn int<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        match self.values.remove(&place.path()) {
            Some(data) => param.map(|old| convert::int_in_place_of(&old, data)),
            None => param,
        }
    }

    fn bool<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.values.remove(&place.path()) {
            Some(data) => param.map(|old| convert::bool_in_place_of(&old, data)),
            None => param,
        }
    }
}
