//! Finding the sharded parameters of a module.
//!
//! Burn's visitors see a reparameterization's tensors, not the reparameterization. Ours looks
//! whether somebody on this thread is asking, and gives its name.

use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor};

use crate::error::Error;
use crate::generation::Generation;
use crate::root::Root;
use crate::slot::Slot;

/// One sharded parameter of a module.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) generation: Arc<Generation>,
    pub(crate) index: usize,
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

impl ModuleVisitor for Nothing {}

/// The sharded parameters of `module`, in its own order.
pub(crate) fn members<M: Module>(module: &M) -> Vec<Member> {
    ASKED.with(|asked| *asked.borrow_mut() = Some(Vec::new()));
    module.visit(&mut Nothing);
    ASKED
        .with(|asked| asked.borrow_mut().take())
        .unwrap_or_default()
}

/// Gives a parameter's name to whoever is asking. Returns whether somebody was.
pub(crate) fn answer(generation: &Arc<Generation>, index: usize) -> bool {
    ASKED.with(|asked| match asked.borrow_mut().as_mut() {
        Some(members) => {
            members.push(Member {
                generation: generation.clone(),
                index,
            });
            true
        }
        None => false,
    })
}

/// The root of a sharded module.
///
/// # Errors
///
/// [`Error::NotSharded`] if it has no sharded parameter.
pub(crate) fn root_of<M: Module>(module: &M) -> Result<Arc<Root>, Error> {
    let members = members(module);
    let first = members.first().ok_or(Error::NotSharded)?;
    first.generation.unit.root().ok_or(Error::NotSharded)
}
