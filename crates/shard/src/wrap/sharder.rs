//! The replacement of a parameter by a stand-in with its shard beside it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Tensor};

use super::initial;
use super::placed::Placed;
use crate::copies::{Copies, Generation};
use crate::error::throw;
use crate::parameter::ShardedParam;
use crate::parameter::identity::counterpart;
use crate::parameter::owned::RootLink;
use crate::shown::Shown;
use crate::state::record;
use crate::survey::{Declared, Survey, stand_in};
use crate::transport;

/// A reparameterizer that replaces each parameter by a stand-in with its value beside it.
pub(super) struct Sharder {
    places: HashMap<String, (Arc<Generation>, usize, Arc<RootLink>)>,
    /// Paths of parameters that no unit manages.
    others: HashSet<String>,
}

impl Sharder {
    /// Returns a sharder for the parameters of these generations, and their units, which the call makes.
    pub(super) fn new(first: Vec<Arc<Generation>>, survey: &Survey) -> (Self, Vec<Placed>) {
        let mut places = HashMap::new();
        let mut made = Vec::with_capacity(first.len());
        for generation in first {
            let root_link = Arc::<RootLink>::default();
            for (index, slot) in generation.unit.slots.iter().enumerate() {
                let place = (generation.clone(), index, root_link.clone());
                places.insert(slot.path.clone(), place);
            }
            made.push(Placed {
                copies: Copies::of(&generation),
                root_link,
                prefix: String::new(),
            });
        }
        let found = survey.parameters.iter().map(|found| &found.path);
        let others = found.filter(|path| !places.contains_key(*path)).cloned();
        let sharder = Self {
            others: others.collect(),
            places,
        };
        (sharder, made)
    }
}

impl Reparameterizer for Sharder {
    type Reparam = ShardedParam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardedParam>) {
        let Some((generation, index, root_link)) = self.places.remove(path) else {
            let param = match self.others.contains(path) {
                true => own_leaf(param),
                false => param,
            };
            return (param, None);
        };
        let unit = generation.unit.clone();
        let device = param.lazy_device();
        let declared = Declared::of(&param);
        let id = param.id;
        let value = initial::value(&unit, &unit.slots[index], &param);
        drop(param);
        let value = value.unwrap_or_else(|error| throw(error));
        let shape = unit.slots[index].shown_shape(unit.groups.shard.rank());
        let shown = Shown::new(id, value, &shape, declared.is_trainable);
        let base = base(&declared, &device, counterpart(id));
        let own = declared.mapper;
        let stand_in = stand_in(declared.shape, &device);
        let base = base
            .load_mapper(record::load(unit, index, own.clone(), stand_in))
            .save_mapper(record::save(Copies::of(&generation), index, own));
        (
            base,
            Some(ShardedParam::new(shown, index, generation, root_link)),
        )
    }
}

/// Returns the parameter with a leaf of this rank's own, lazy if it was: ranks that share a leaf share a graph,
/// and would wait for each other's backward. What is a clone here may have others there.
fn own_leaf<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    param.init_mapper(|tensor| transport::in_place_of(&tensor, tensor.clone().inner().into_data()))
}

/// Returns the parameter itself: a stand-in, recorded in the shape in which it always was.
fn base<const D: usize>(declared: &Declared<D>, device: &Device, id: ParamId) -> Param<Tensor<D>> {
    let shape = declared.shape;
    if shape == declared.recorded {
        return Param::initialized(id, stand_in(shape, device));
    }
    // Burn checks records against the declared shape of a lazy parameter.
    let make = move |device: &Device, _: bool| stand_in(shape, device);
    Param::uninitialized(id, make, device.clone(), false, declared.recorded.into())
}
