//! The tensors of a module, and where the elements of each are.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_fsdp_collectives::Source;
use burn_fsdp_tensors as tensors;

use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::root::{Known, Root};
use crate::state::unpacked;

/// A tensor of a module, and where its elements are.
pub(crate) struct StateTensor {
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) held: Held,
}

/// The elements of a tensor, by location.
pub(crate) enum Held {
    /// Elements sharded over ranks.
    Sharded(Box<Member>),
    /// Float elements on this rank, flat.
    Here(Box<Tensor<1>>),
    /// Integers or booleans on this rank, or elements that are unpacked when they are read.
    Read(Source),
}

/// Returns all tensors of `module`, in module order.
pub(crate) fn all<M: Module>(module: &M, root: &Root) -> Vec<StateTensor> {
    // Running states show their last update only after `valid`.
    drop(module.valid());
    let mut all = All {
        members: inspect::fields(module).into_iter().collect(),
        known: root.known(),
        found: Vec::new(),
    };
    inspect::visit(module, &mut all);
    all.found
}

struct All<'a> {
    members: HashMap<String, Member>,
    known: &'a Known,
    found: Vec<StateTensor>,
}

impl path::Visitor for All<'_> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        let tensor = match self.members.remove(&path) {
            Some(member) if member.is_tied => return,
            Some(member) => {
                let slot = member.slot();
                StateTensor {
                    shape: slot.shape.clone(),
                    dtype: slot.elements.stored.dtype,
                    held: if slot.is_gathered() {
                        Held::Sharded(Box::new(member))
                    } else if slot.quantized().is_some() {
                        Held::Read(unpacked::source(&member.generation, member.index))
                    } else {
                        Held::Here(Box::new(member.generation.value(member.index).inner()))
                    },
                    path,
                }
            }
            None => {
                let (shape, flat) = flatten(param.val());
                let flat = self.known.in_original_type(&path, param.id, flat);
                StateTensor {
                    shape,
                    dtype: flat.dtype(),
                    held: Held::Here(Box::new(flat)),
                    path,
                }
            }
        };
        self.found.push(tensor);
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        self.read(place, param.val().into_data());
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        self.read(place, param.val().into_data());
    }
}

impl All<'_> {
    fn read(&mut self, place: &Location, data: TensorData) {
        self.found.push(StateTensor {
            path: place.path(),
            shape: data.shape().to_vec(),
            dtype: data.dtype(),
            held: Held::Read(tensors::data_source(data)),
        });
    }
}

/// Returns the shape, and the flat elements without autodiff.
fn flatten<const D: usize>(value: Tensor<D>) -> (Vec<usize>, Tensor<1>) {
    let shape = value.dims().to_vec();
    let len: usize = shape.iter().product();
    (shape, value.inner().reshape::<1, _>([len]))
}
