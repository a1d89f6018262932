//! Running states, such as BatchNorm's, that belong only to this rank.
//!
//! In Burn, all clones of a module share a running state. If a module was built once and cloned into the ranks, all
//! ranks would share the state.

use std::any::Any;
use std::collections::{HashMap, VecDeque};

use burn::module::{Flag, Module, Param};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp_collectives::ProcessGroup;

use crate::ambient::{Purpose, within};
use crate::device;
use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::survey::{Survey, survey};

/// Returns the module with running states that no other rank shares. They are new only if another rank has clones of
/// the old ones.
///
/// Collective over the ranks of `group`: one exchange of the ids of running states, if there are any.
pub(crate) fn separate<M: Module>(
    module: M,
    survey: &Survey,
    group: &ProcessGroup,
) -> Result<M, Error> {
    if survey.buffers.is_empty() || group.size() == 1 || group.is_fake() {
        return Ok(module);
    }
    let ids = survey
        .buffer_ids
        .iter()
        .flat_map(|id| id.val().to_le_bytes());
    let own: Vec<u8> = ids.collect();
    let all = group.exchange("ids of running states", own.clone())?;
    // Ids are random, so equal ids belong to clones of one module.
    let is_clone = all.iter().enumerate().any(|(rank, ids)| {
        let (own, ids) = (own.as_chunks::<8>().0, ids.as_chunks::<8>().0);
        rank != group.rank() && ids.iter().any(|id| own.contains(id))
    });
    if is_clone {
        Ok(cloned(module, survey))
    } else {
        Ok(module)
    }
}

/// Returns the module with new running states, which no clone of it shares.
pub(crate) fn own<M: Module>(module: M) -> Result<M, Error> {
    // The survey maps a clone. It must not count as a change of the sharded parameters, which other ranks do not make.
    let survey = within(Purpose::Prepare, || survey(&module))?;
    if survey.buffers.is_empty() {
        Ok(module)
    } else {
        Ok(cloned(module, &survey))
    }
}

/// Returns the module with separate running states, and everything else unchanged.
fn cloned<M: Module>(module: M, survey: &Survey) -> M {
    let mut kept = Kept {
        states: survey.buffers.to_vec(),
        devices: survey.devices.clone(),
        ..Kept::default()
    };
    inspect::visit(&module, &mut kept);
    // Only mappers see flags.
    let module = within(Purpose::Prepare, || {
        path::map(module, &mut Flags(&mut kept))
    });
    // Only switching between `valid` and `train` creates new running states; its other effects are undone.
    let module = within(Purpose::OwnStates, || module.valid().train());
    within(Purpose::Prepare, || path::map(module, &mut PutBack(kept)))
}

/// The tensors and flags of a module, to be put back. Running states are left out.
#[derive(Default)]
struct Kept {
    states: Vec<String>,
    devices: HashMap<String, Device>,
    /// The tensors by path: the visit reaches the factors of adapters, and the map does not.
    params: HashMap<String, Box<dyn Any>>,
    /// The flags in module order.
    flags: VecDeque<Param<Flag>>,
}

impl path::Visitor for Kept {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if !self.states.contains(&path) {
            // `valid` initializes lazy parameters, and the clones that share their state. An initialized weight in
            // columns would load no record.
            let kept = if param.is_initialized() {
                param.clone()
            } else {
                param.clone().init_mapper(|value| value)
            };
            self.params.insert(path, Box::new(kept));
        }
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        self.params.insert(place.path(), Box::new(param.clone()));
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        self.params.insert(place.path(), Box::new(param.clone()));
    }
}

impl Kept {
    fn take<T: 'static>(&mut self, path: &str) -> Option<T> {
        let param = self.params.remove(path)?.downcast().ok()?;
        Some(*param)
    }
}

struct Flags<'a>(&'a mut Kept);

impl path::Mapper for Flags<'_> {
    fn float<const D: usize>(
        &mut self,
        _place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        param
    }

    fn flag(&mut self, _place: &Location, flag: Param<Flag>) -> Param<Flag> {
        self.0.flags.push_back(flag.clone());
        flag
    }
}

struct PutBack(Kept);

impl path::Mapper for PutBack {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = place.path();
        if !self.0.states.contains(&path) {
            return self.0.take(&path).unwrap_or(param);
        }
        match self.0.devices.get(&path) {
            Some(device) => param.map(|tensor| device::tracked(tensor.inner(), device)),
            None => param,
        }
    }

    fn int<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        self.0.take(&place.path()).unwrap_or(param)
    }

    fn bool<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.0.take(&place.path()).unwrap_or(param)
    }

    fn flag(&mut self, _place: &Location, flag: Param<Flag>) -> Param<Flag> {
        self.0.flags.pop_front().unwrap_or(flag)
    }
}
