//! Burn's record of a sharded module, tensor by tensor.

use std::collections::HashMap;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_fsdp_tensors as tensors;

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::root::Known;
use crate::state::buffers;
use crate::state::full::gather;
use crate::state::record::plainly;
use crate::thrown::{catch, throw};

/// A tensor of a module's record, passed by [`recorded_state`].
#[derive(Debug)]
#[non_exhaustive]
pub struct RecordedTensor {
    /// Path in the module, such as `blocks.3.fc.weight`.
    pub path: String,
    /// The tensor's id in the record.
    pub id: ParamId,
    /// The tensor's elements in the record: the transpose for a column-layout linear layer.
    pub data: TensorData,
}

/// Calls `visit` on rank 0 with each tensor of a sharded module's record (see [`into_record`](crate::into_record)), in
/// module order. Running states are rank 0's.
///
/// Rank 0 holds one whole tensor at a time, or two if the parameter is recorded in a different form. The other ranks
/// only send; `visit` is not called on them. `visit` cannot stop early, because the other ranks would not know.
///
/// Collective over all ranks of the module, between steps: one gather for each sharded parameter.
///
/// # Errors
///
/// [`Error::NotSharded`]; a failed collective.
pub fn recorded_state<M: Module>(
    module: &M,
    visit: impl FnMut(RecordedTensor),
) -> Result<(), Error> {
    let root = inspect::root_of(module)?;
    buffers::settle(module)?;
    let mut each = Each {
        members: inspect::fields(module).into_iter().collect(),
        known: root.known(),
        is_first: root.group.rank() == 0,
        visit,
    };
    catch(|| inspect::visit(module, &mut each)).map(drop)
}

struct Each<'a, F> {
    members: HashMap<String, Member>,
    known: &'a Known,
    is_first: bool,
    visit: F,
}

impl<F: FnMut(RecordedTensor)> Each<'_, F> {
    fn tell(&mut self, place: &Location, id: ParamId, data: TensorData) {
        let path = place.path();
        (self.visit)(RecordedTensor { path, id, data });
    }
}

impl<F: FnMut(RecordedTensor)> path::Visitor for Each<'_, F> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let Some(member) = self.members.remove(&place.path()) else {
            if self.is_first {
                let saved = plainly(|| param.transform_for_save().val());
                let saved = self.known.in_original_type(&place.path(), param.id, saved);
                self.tell(place, param.id, saved.into_data());
            }
            return;
        };
        let Some(whole) = whole(&member, self.is_first) else {
            return;
        };
        let whole = whole.reshape(member.slot().dims::<D>());
        let (id, _, mapper) = param.clone().consume();
        let saved = plainly(|| mapper.on_save(whole));
        self.tell(place, id, saved.into_data());
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        if self.is_first {
            let saved = param.transform_for_save().val();
            self.tell(place, param.id, saved.into_data());
        }
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        if self.is_first {
            let saved = param.transform_for_save().val();
            self.tell(place, param.id, saved.into_data());
        }
    }
}

/// Returns the whole value of a parameter, flat and on the computing device, if this rank records it.
fn whole(member: &Member, is_first: bool) -> Option<Tensor<1>> {
    let (generation, slot) = (&member.generation, member.slot());
    let device = generation.device(member.index).without_autodiff();
    if !slot.is_gathered() {
        let own = || generation.value(member.index).inner().to_device(&device);
        return is_first.then(own);
    }
    let buffer = gather(member).unwrap_or_else(|error| throw(error));
    let buffer = buffer.filter(|_| is_first)?;
    Some(tensors::tensor(buffer, slot.elements.stored.dtype, &device))
}
