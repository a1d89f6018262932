//! Detects parameters outside of all units that each rank would train with its own gradient.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::root::Root;

/// Rejects gradients of parameters of `module` that are neither managed by a unit nor ignored by a policy.
///
/// # Errors
///
/// [`Error::Unmanaged`] with the first such parameter, if several ranks train together.
pub(crate) fn refuse<M: Module>(
    module: &M,
    roots: &[Arc<Root>],
    gradients: &GradientsParams,
) -> Result<(), Error> {
    if roots.iter().all(|root| root.group.size() == 1) {
        return Ok(());
    }
    let mut search = Search {
        roots,
        gradients,
        found: None,
    };
    inspect::visit(module, &mut search);
    search
        .found
        .map_or(Ok(()), |path| Err(Error::Unmanaged { path }))
}

struct Search<'a> {
    roots: &'a [Arc<Root>],
    gradients: &'a GradientsParams,
    found: Option<String>,
}

impl path::Visitor for Search<'_> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        // The gradient of a sharded parameter is not under its stand-in's id.
        if self.found.is_some() || self.gradients.get::<D>(param.id).is_none() {
            return;
        }
        let path = place.path();
        let mut roots = self.roots.iter();
        let is_empty = param.lazy_shape().num_elements() == 0;
        if !is_empty && !roots.any(|root| root.known().leaves_alone(&path, param.id)) {
            self.found = Some(path);
        }
    }
}
