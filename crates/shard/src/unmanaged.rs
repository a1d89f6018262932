//! Detects parameters outside of all units that each rank would train with its own gradient.

use std::sync::Arc;

use burn::optim::GradientsParams;

use crate::error::Error;
use crate::leaves::Leaf;
use crate::root::Root;

/// Rejects gradients of trained parameters that are neither managed by a unit nor ignored by a policy. `leaves` are those
/// outside of all units; the gradient of a sharded parameter is not under its stand-in's id.
///
/// # Errors
///
/// [`Error::Unmanaged`] with the first such parameter, if several ranks train together.
pub(crate) fn refuse(
    leaves: &[Leaf],
    roots: &[Arc<Root>],
    gradients: &GradientsParams,
) -> Result<(), Error> {
    if roots.iter().all(|root| root.group.size() == 1) {
        return Ok(());
    }
    let is_unmanaged = |leaf: &&Leaf| {
        let mut roots = roots.iter();
        !leaf.is_empty
            && leaf.has_gradient(gradients)
            && !roots.any(|root| root.known().leaves_alone(&leaf.path, leaf.id))
    };
    match leaves.iter().find(is_unmanaged) {
        None => Ok(()),
        Some(leaf) => Err(Error::Unmanaged {
            path: leaf.path.clone(),
        }),
    }
}
