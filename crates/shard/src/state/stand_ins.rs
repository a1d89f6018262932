//! Stand-ins of sharded parameters that have grown to full size.
//!
//! Burn shows a mapper both the stand-in and the shard of a parameter. A stand-in has one element of memory. A mapper
//! that computes with all float tensors, such as a moving average or weight clipping, turns it into a tensor of full
//! size. Burn has no hook to undo that.

use std::collections::HashSet;

use burn::backend::Flex;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::ambient::{Purpose, within};
use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::survey::stand_in;

/// Returns the memory of the stand-ins of the sharded `module` on the CPU backend, in bytes. It is negligible unless a
/// mapper has computed with the stand-ins. [`renew_stand_ins`] frees it.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn stand_in_bytes<M: Module>(module: &M) -> Result<usize, Error> {
    inspect::root_of(module)?;
    let mut bytes = Bytes {
        paths: paths(module),
        sum: 0,
    };
    inspect::visit(module, &mut bytes);
    Ok(bytes.sum)
}

/// Returns the sharded `module` with new stand-ins, to free the full-size ones that a `map` over all float tensors has
/// created. Shards, ids and everything else stay unchanged.
///
/// Not collective.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn renew_stand_ins<M: Module>(module: M) -> Result<M, Error> {
    inspect::root_of(&module)?;
    let mut renew = Renew {
        paths: paths(&module),
    };
    // This map leaves sharded parameters unchanged.
    Ok(within(Purpose::Prepare, || path::map(module, &mut renew)))
}

fn paths<M: Module>(module: &M) -> HashSet<String> {
    let fields = inspect::fields(module).into_iter();
    fields.map(|(path, _)| path).collect()
}

struct Bytes {
    paths: HashSet<String>,
    sum: usize,
}

impl path::Visitor for Bytes {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        if self.paths.contains(&place.path())
            && param.is_initialized()
            && let Ok(primitive) = param.base().inner().try_into_primitive::<Flex>()
        {
            self.sum += primitive.bytes().len();
        }
    }
}

struct Renew {
    paths: HashSet<String>,
}

impl path::Mapper for Renew {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        if self.paths.contains(&place.path()) && param.is_initialized() {
            param.map(|old| stand_in(old.dims(), &old.device()))
        } else {
            param
        }
    }
}
