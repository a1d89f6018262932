//! Finding the sharded parameters of a module.
//!
//! Burn's visitors see a reparameterization's tensors, not the reparameterization. Ours looks
//! whether somebody on this thread is asking, and gives its name.

use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::generation::{Copied, Generation, Owned};
use crate::parameter::{CONTAINER, NAME};
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
}

impl Member {
    pub(crate) fn slot(&self) -> &Slot {
        &self.generation.unit.slots[self.index]
    }
}

thread_local! {
    static ASKED: RefCell<Option<Vec<Member>>> = const { RefCell::new(None) };
}

struct Nothing;

impl path::Visitor for Nothing {
    fn float<const D: usize>(&mut self, _place: &Place, _param: &Param<Tensor<D>>) {}
}

/// The sharded parameters of `module`, in its own order.
pub(crate) fn members<M: Module>(module: &M) -> Vec<Member> {
    visit(module, &mut Nothing)
}

/// Visits `module` without its shards, and returns them.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl path::Visitor) -> Vec<Member> {
    /// Nobody asks any more, also after an unwinding.
    struct Asked;
    impl Drop for Asked {
        fn drop(&mut self) {
            ASKED.take();
        }
    }
    ASKED.set(Some(Vec::new()));
    let _asked = Asked;
    path::visit(module, visitor);
    ASKED.take().unwrap_or_default()
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
pub(crate) fn answer(owned: &Owned, index: usize, id: ParamId) -> bool {
    ASKED.with(|asked| match asked.borrow_mut().as_mut() {
        Some(members) => {
            members.push(Member {
                generation: Arc::clone(owned),
                index,
                copy: owned.copy(),
                id,
            });
            true
        }
        None => false,
    })
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
