//! Finding the sharded parameters of a module.
//!
//! Burn's visitors see a reparameterization's tensors, not the reparameterization. Ours looks
//! whether somebody on this thread is asking, and gives its name.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor};

use crate::ambient::{Purpose, is_within, within};
use crate::error::Error;
use crate::generation::{Copied, Generation, Owned};
use crate::identity::Identity;
use crate::parameter::{CONTAINER, NAME, ShardedParam};
use crate::path::{self, Place};
use crate::root::Root;
use crate::slot::Slot;

/// One sharded parameter of a module.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) generation: Arc<Generation>,
    pub(crate) index: usize,
    /// The copy of the module.
    pub(crate) copy: Copied,
    /// Of the value that optimizers and gradients see.
    pub(crate) id: ParamId,
    /// A hold that counts for nothing, to read the full parameter by.
    owned: Owned,
    /// This rank's shard, as the module has it.
    value: Tensor<1>,
}

impl Member {
    /// The full parameter, as the model's own code gets it. Collective.
    pub(crate) fn full<const D: usize>(&self) -> Result<Tensor<D>, Error> {
        let root = self.generation.unit.root();
        root.expect("a sharded module has a root")
            .access(&self.owned, self.value.clone())
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.generation.unit.slots[self.index]
    }
}

thread_local! {
    static MEMBERS: RefCell<Vec<Member>> = const { RefCell::new(Vec::new()) };
    /// The id of the parameter that was shown last: a shard comes right after its stand-in.
    static LAST: Cell<Option<ParamId>> = const { Cell::new(None) };
}

struct Nothing;

impl path::Visitor for Nothing {
    fn float<const D: usize>(&mut self, _place: &Place, _param: &Param<Tensor<D>>) {}
}

/// The sharded parameters of `module`, in its own order.
pub(crate) fn members<M: Module>(module: &M) -> Vec<Member> {
    visit(module, &mut Nothing)
}

/// Visits `module` without its shards, and returns them. Shards learn by it which ids their stand-ins
/// have.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl path::Visitor) -> Vec<Member> {
    // What an earlier walk left that was broken off.
    drop(MEMBERS.take());
    within(Purpose::Inspect, || {
        path::visit(module, &mut Noting(visitor))
    });
    MEMBERS.take()
}

/// Remembers the id of what is shown.
struct Noting<'a, V>(&'a mut V);

impl<V: path::Visitor> path::Visitor for Noting<'_, V> {
    fn float<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D>>) {
        LAST.set(Some(param.id));
        self.0.float(place, param);
    }

    fn int<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D, Int>>) {
        self.0.int(place, param);
    }

    fn bool<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D, Bool>>) {
        self.0.bool(place, param);
    }

    fn enter(&mut self, place: &Place, name: &str, container: &str) {
        self.0.enter(place, name, container);
    }

    fn exit(&mut self, place: &Place) {
        self.0.exit(place);
    }
}

/// Gives the shards of `module` the ids that belong to a record which has just been loaded.
///
/// Every function of this crate that gets the module does so by itself,
/// [`backward`](crate::backward) included. It is needed where Burn's own functions come first after
/// [`Module::load_record`]: groups by ids, or a training loop that never calls one of ours. Does
/// nothing to a module without shards. Not collective.
pub fn settle_ids<M: Module>(module: &M) {
    drop(members(module));
}

/// The id by which optimizers, gradients and groups know a parameter, sharded or not. The `id` field
/// of a sharded one is that of its stand-in, which records hold.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use burn_fsdp_shard::param_id;
///
/// let layer: Linear = LinearConfig::new(2, 2).init(&Device::flex());
/// assert_eq!(param_id(&layer.weight), layer.weight.id);
/// ```
pub fn param_id<const D: usize>(param: &Param<Tensor<D>>) -> ParamId {
    match param.reparameterization::<ShardedParam>() {
        Some(sharded) => sharded.settled_id(param.id),
        None => param.id,
    }
}

/// The sharded parameters of `module` with their paths in it, in its own order.
///
/// A slot knows only its path in the module that was sharded, which may be a child of this one.
pub(crate) fn places<M: Module>(module: &M) -> Vec<(String, Member)> {
    let mut paths = Paths::default();
    let members = visit(module, &mut paths);
    paths.sharded.into_iter().zip(members).collect()
}

#[derive(Default)]
struct Paths {
    sharded: Vec<String>,
}

impl path::Visitor for Paths {
    fn enter(&mut self, place: &Place, name: &str, container: &str) {
        if name == NAME && container == CONTAINER {
            // The parameter itself has just been visited, here.
            self.sharded.push(place.path());
        }
    }

    fn float<const D: usize>(&mut self, _place: &Place, _param: &Param<Tensor<D>>) {}
}

/// Gives a parameter's name to whoever is asking. Returns whether somebody was.
pub(crate) fn answer(owned: &Owned, value: &Param<Tensor<1>>, identity: &Identity) -> bool {
    if !is_within(Purpose::Inspect) {
        return false;
    }
    let id = match LAST.get() {
        Some(stand_in) => identity.settle(stand_in),
        None => identity.id(),
    };
    MEMBERS.with_borrow_mut(|members| {
        members.push(Member {
            generation: Arc::clone(owned),
            index: owned.slot,
            copy: owned.copy(),
            id,
            owned: within(Purpose::CopyForGraph, || owned.clone()),
            value: value.base(),
        });
    });
    true
}

/// The roots of a module: one, unless only children of it were sharded.
///
/// # Errors
///
/// [`Error::NotSharded`] if it has no sharded parameter.
pub(crate) fn roots_of<M: Module>(module: &M) -> Result<Vec<Arc<Root>>, Error> {
    let mut roots: Vec<Arc<Root>> = Vec::new();
    for member in members(module) {
        let root = member.generation.unit.root().ok_or(Error::NotSharded)?;
        if !roots.iter().any(|known| Arc::ptr_eq(known, &root)) {
            roots.push(root);
        }
    }
    match roots.is_empty() {
        true => Err(Error::NotSharded),
        false => Ok(roots),
    }
}

/// The first root of a module.
///
/// # Errors
///
/// [`Error::NotSharded`] if it has no sharded parameter.
pub(crate) fn root_of<M: Module>(module: &M) -> Result<Arc<Root>, Error> {
    Ok(roots_of(module)?.swap_remove(0))
}
