//! The sharded parameters of a module, and the walk that finds them.
//!
//! Burn's visitors see a reparameterization's tensors, not the reparameterization itself. During a walk of the engine,
//! its reparameterizations add themselves to the members that this thread collects.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, Int, Tensor};

use crate::ambient::{Purpose, is_within, within};
use crate::copies::{Copied, Generation};
use crate::error::Error;
use crate::parameter::identity::{Identity, counterpart};
use crate::parameter::owned::{Owned, RootLink};
use crate::path::{self, Location};
use crate::shown::Shown;
use crate::slot::Slot;
use crate::unit::Unit;

/// One sharded parameter of a module.
pub(crate) struct Member {
    pub(crate) generation: Arc<Generation>,
    pub(crate) index: usize,
    pub(crate) copy: Copied,
    /// The id that optimizers and gradients use for the parameter.
    pub(crate) id: ParamId,
    /// True for every field of a shared parameter except the first.
    pub(crate) is_tied: bool,
    /// An uncounted reference for reading the full parameter.
    owned: Owned,
    /// The graph parent of the full parameter.
    parent: Tensor<1>,
}

impl Clone for Member {
    /// Returns the same member. Unlike a clone of the module, it is not a copy with another number.
    fn clone(&self) -> Self {
        Self {
            generation: self.generation.clone(),
            owned: within(Purpose::CopyForGraph, || self.owned.clone()),
            parent: self.parent.clone(),
            ..*self
        }
    }
}

impl Member {
    /// Returns the full parameter in the form that the model's code sees. Collective.
    pub(crate) fn full<const D: usize>(&self) -> Result<Tensor<D>, Error> {
        within(Purpose::Read, || self.owned.full(self.parent.clone()))
    }

    /// Returns all values of the unit in this copy of the module.
    pub(crate) fn values(&self) -> Arc<Generation> {
        self.owned.values()
    }

    pub(crate) fn root_link(&self) -> &Arc<RootLink> {
        self.owned.root_link()
    }

    /// Returns a key that is equal for all fields that share the parameter.
    pub(crate) fn key(&self) -> Key {
        (Arc::as_ptr(&self.generation.unit), self.index)
    }

    pub(crate) fn slot(&self) -> &Slot {
        &self.generation.unit.slots[self.index]
    }
}

/// Identifies a parameter regardless of its values, by its unit and its index in the unit.
pub(crate) type Key = (*const Unit, usize);

thread_local! {
    static MEMBERS: RefCell<Vec<Member>> = const { RefCell::new(Vec::new()) };
    /// The id of the last visited parameter: a shard directly follows its stand-in.
    static LAST: Cell<Option<ParamId>> = const { Cell::new(None) };
}

/// Visits `module` without its shards. Returns its sharded parameters, and the other fields that share them. Settles
/// the shards' ids from their stand-ins.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl path::Visitor) -> Vec<Member> {
    // Members may remain from a walk that was interrupted.
    drop(MEMBERS.take());
    within(Purpose::Inspect, || {
        path::visit(module, &mut Noting(visitor))
    });
    MEMBERS.take()
}

/// A visitor that remembers the id of the last visited parameter.
struct Noting<'a, V>(&'a mut V);

impl<V: path::Visitor> path::Visitor for Noting<'_, V> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        LAST.set(Some(param.id));
        self.0.float(place, param);
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        self.0.int(place, param);
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        self.0.bool(place, param);
    }

    fn enter(&mut self, place: &Location, name: &str, container: &str) {
        self.0.enter(place, name, container);
    }

    fn exit(&mut self, place: &Location) {
        self.0.exit(place);
    }
}

/// Called when a walk reaches a sharded parameter: adds it to the members that an engine's walk on this thread
/// collects. Returns true if such a walk is in progress.
pub(crate) fn answer(owned: &Owned, value: &Shown, identity: &Identity) -> bool {
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
            is_tied: false,
            owned: within(Purpose::CopyForGraph, || owned.clone()),
            parent: value.parent(),
        });
    });
    true
}

/// Called when an engine's walk reaches a tied field: adds it to the members that this thread collects. `of` holds the
/// shared parameter's values.
pub(crate) fn answer_tied(of: Owned) {
    let index = of.slot;
    let parent = of.own_leaf(index);
    MEMBERS.with_borrow_mut(|members| {
        members.push(Member {
            generation: Arc::clone(&of),
            index,
            copy: of.copy(),
            id: counterpart(LAST.get().unwrap_or_default()),
            is_tied: true,
            owned: of,
            parent,
        });
    });
}
