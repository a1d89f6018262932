//! What one rank holds of a module, as bytes: for checkpoints.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::{Partition, Source};

use crate::error::{Error, catch};
use crate::full::{self, Held};
use crate::inspect;
use crate::path::{self, Place};
use crate::transport;

/// A float tensor of a module, and this rank's part of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalTensor {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub path: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Element type as it is stored.
    pub dtype: DType,
    /// What it is, and how much of it this rank holds.
    pub part: LocalPart,
    /// The elements that this rank holds, in row-major order and the machine's byte order. Read where
    /// they lie: what is done to the module afterwards does not change them.
    pub elements: Source,
}

/// What a rank holds of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalPart {
    /// A range of the flat elements of a sharded parameter.
    Shard {
        /// The elements.
        range: Range<usize>,
        /// How all ranks of the shard axis cut the parameter.
        partition: Partition,
    },
    /// All of a parameter that every rank holds alike.
    Whole,
    /// All of a tensor that no unit manages: a running state, or a parameter that was ignored. Each
    /// rank has its own.
    Own,
}

/// The float tensors of a sharded module, in its order, with this rank's part of each. Nothing is
/// copied or communicated.
///
/// Running states are the ranks' own: [`sync_buffers`](crate::sync_buffers) first, if one of them is
/// to stand for all.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn local_state<M: Module>(module: &M) -> Result<Vec<LocalTensor>, Error> {
    inspect::root_of(module)?;
    let managed: HashMap<_, _> = inspect::places(module).into_iter().collect();
    let tensors = full::tensors(module).into_iter().map(|tensor| {
        let (part, flat) = match tensor.held {
            Held::Sharded(member) => {
                let slot = member.slot();
                let rank = member.generation.unit.group.rank();
                let part = match slot.is_gathered() {
                    true => LocalPart::Shard {
                        range: slot.held_range(rank),
                        partition: slot.partition,
                    },
                    false => LocalPart::Whole,
                };
                (part, member.generation.value(member.index).inner())
            }
            Held::Here(flat) => match managed.contains_key(&tensor.path) {
                true => (LocalPart::Whole, *flat),
                false => (LocalPart::Own, *flat),
            },
        };
        LocalTensor {
            path: tensor.path,
            shape: tensor.shape,
            dtype: tensor.dtype,
            part,
            elements: transport::source(flat, None),
        }
    });
    Ok(tensors.collect())
}

/// The id under which optimizers and gradients know a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalId {
    /// Path in the module.
    pub path: String,
    /// On this rank and in this run only.
    pub id: ParamId,
}

/// The ids of the sharded parameters of a module, in its order.
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
    });
    Ok(ids.collect())
}

/// Replaces what this rank holds of a sharded module. `read` gets each tensor as
/// [`local_state`] describes it, with its present elements, and returns new bytes, or `None` to leave
/// it.
///
/// Not collective. All ranks must replace alike.
///
/// # Errors
///
/// Whatever `read` returns; [`Error::NotSharded`]; [`Error::LocalLength`] for another number of bytes.
pub fn load_local_state<M: Module, E: From<Error>>(
    module: M,
    mut read: impl FnMut(&LocalTensor) -> Result<Option<Vec<u8>>, E>,
) -> Result<M, E> {
    let members: HashMap<_, _> = inspect::places(&module).into_iter().collect();
    let mut plain = HashMap::new();
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
        match members.get(&tensor.path) {
            Some(member) => {
                let device = member.generation.value(member.index).device();
                let flat = transport::owned(bytes, tensor.dtype, &device);
                *member.slot().loaded.lock() = Some(flat);
            }
            None => drop(plain.insert(tensor.path, bytes)),
        }
    }
    Ok(catch(|| path::map(module, &mut PutBack { plain }))?)
}

/// Puts plain tensors in their places; sharded ones are waiting in theirs.
struct PutBack {
    plain: HashMap<String, Vec<u8>>,
}

impl path::Mapper for PutBack {
    fn float<const D: usize>(
        &mut self,
        place: &Place,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        match self.plain.remove(&place.path()) {
            None => param,
            Some(bytes) => param.map(|old| {
                let data = transport::owned_data(bytes, old.shape(), old.dtype());
                transport::in_place_of(&old, data)
            }),
        }
    }
}
