//! Stand-ins of sharded parameters that have come to hold memory.
//!
//! Burn shows a mapper the stand-in and the shard of a parameter alike. One that computes with all
//! float tensors, such as a moving average or a clip of weights, makes a stand-in, which has one
//! element of memory, a tensor of the full size, and Burn offers no place to take that back.

use std::collections::HashSet;

use burn::backend::Flex;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::ambient::{Purpose, within};
use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::survey::stand_in;

/// Returns the bytes that stand-ins of the sharded `module` hold on the CPU backend: next to
/// nothing, unless a mapper has computed with them. [`renew_stand_ins`] frees them.
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

/// Returns the sharded `module` with new stand-ins, after a `map` that has computed with all its float tensors
/// and so made stand-ins of the full size. Shards, ids and everything else stay as they are.
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
    // What is sharded stays as it is.
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
        match self.paths.contains(&place.path()) && param.is_initialized() {
            true => param.map(|old| stand_in(old.dims(), &old.device())),
            false => param,
        }
    }
}
