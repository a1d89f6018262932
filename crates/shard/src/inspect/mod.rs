//! Finds the sharded parameters and the roots of a module, and reports on them.
//!
//! - `units`: handles to a module's units. `plan`: the units with their sizes. `order`: the operations of a step.
//! - `memory`: the module's bytes on this rank. `names`: the paths of its parameters. `auto`: units by size.

pub(crate) mod auto;
pub(crate) mod memory;
pub(crate) mod names;
pub(crate) mod order;
pub(crate) mod plan;
pub(crate) mod units;

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::path::{self, CONTAINER, Location, NAME};
use crate::root::Root;

pub(crate) use crate::parameter::member::{Key, Member, visit};

struct Nothing;

impl path::Visitor for Nothing {
    fn float<const D: usize>(&mut self, _place: &Location, _param: &Param<Tensor<D>>) {}
}

/// Returns the sharded parameters of `module`, in module order. A shared parameter appears once, for its first field.
pub(crate) fn members<M: Module>(module: &M) -> Vec<Member> {
    let mut members = visit(module, &mut Nothing);
    members.retain(|member| !member.is_tied);
    members
}

/// Assigns the ids from a newly loaded record to the shards of `module`.
///
/// Every function of this crate that receives the module, including [`backward`](crate::backward), already does this.
/// Call it only if Burn's own functions use the module first after [`Module::load_record`]: for groups by ids, or in a
/// training loop that never calls this crate. Does nothing to a module without shards. Not collective.
pub fn settle_ids<M: Module>(module: &M) {
    drop(members(module));
}

/// Returns the sharded parameters of `module` with their paths in it, in module order. A shared parameter appears once,
/// for its first field.
///
/// A slot stores only its path in the module that was sharded, which may be a child of this one.
pub(crate) fn places<M: Module>(module: &M) -> Vec<(String, Member)> {
    let mut fields = fields(module);
    fields.retain(|(_, member)| !member.is_tied);
    fields
}

/// Returns the sharded parameters of `module` like [`places`], but once for every field that shares one.
pub(crate) fn fields<M: Module>(module: &M) -> Vec<(String, Member)> {
    let mut paths = Paths::default();
    let members = visit(module, &mut paths);
    paths.sharded.into_iter().zip(members).collect()
}

#[derive(Default)]
struct Paths {
    sharded: Vec<String>,
    /// The path of the last visited parameter, until its reparameterization is entered. A reparameterization is entered
    /// again after the factors of its adapter.
    last: Option<String>,
}

impl path::Visitor for Paths {
    fn enter(&mut self, _place: &Location, name: &str, container: &str) {
        if name == NAME && container == CONTAINER {
            self.sharded.extend(self.last.take());
        }
    }

    fn float<const D: usize>(&mut self, place: &Location, _param: &Param<Tensor<D>>) {
        self.last = Some(place.path());
    }
}

/// Returns the roots of a module: one, unless only its children were sharded.
///
/// # Errors
///
/// [`Error::NotSharded`] if it has no sharded parameter.
pub(crate) fn roots_of<M: Module>(module: &M) -> Result<Vec<Arc<Root>>, Error> {
    roots_among(&members(module))
}

/// Returns the roots of these sharded parameters, like [`roots_of`].
pub(crate) fn roots_among(members: &[Member]) -> Result<Vec<Arc<Root>>, Error> {
    let mut roots: Vec<Arc<Root>> = Vec::new();
    for member in members {
        let root = member.root_link().root().ok_or(Error::NotSharded)?;
        if !roots.iter().any(|known| Arc::ptr_eq(known, &root)) {
            roots.push(root);
        }
    }
    if roots.is_empty() {
        Err(Error::NotSharded)
    } else {
        Ok(roots)
    }
}

/// Returns the first root of a module.
///
/// # Errors
///
/// [`Error::NotSharded`] if it has no sharded parameter.
pub(crate) fn root_of<M: Module>(module: &M) -> Result<Arc<Root>, Error> {
    Ok(roots_of(module)?.swap_remove(0))
}
