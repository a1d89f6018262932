//! Ranks that share an autodiff leaf, and would wait for each other's backward.
//!
//! Burn locks all graphs that meet in a leaf while it goes backward through one of them. Ranks that are
//! threads and hold clones of one parameter would so exclude each other, each in the middle of
//! operations that need the other. What the engine manages, or is told to leave alone, gets leaves of
//! the rank's own; of a parameter beside sharded modules it knows nothing before the first backward,
//! which looks for it. A rank that is still in its forward by then may already be waiting: that ends
//! with the deadline of the process group.

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use parking_lot::Mutex;

use crate::error::Error;
use crate::inspect;
use crate::op;
use crate::path::{self, Place};

/// The ranks of this process by the leaves that they go backward to now.
static CLAIMED: Mutex<Option<HashMap<NodeId, usize>>> = Mutex::new(None);

/// Leaves that are this rank's until it is dropped.
pub(crate) struct Claim(Vec<NodeId>);

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock();
        for node in &self.0 {
            claimed.get_or_insert_default().remove(node);
        }
    }
}

/// Claims the leaves of `module` that no unit manages, for `rank`.
///
/// # Errors
///
/// [`Error::SharedLeaf`] if another rank of this process has one of them.
pub(crate) fn claim<M: Module>(module: &M, rank: usize) -> Result<Claim, Error> {
    let mut leaves = Leaves::default();
    inspect::visit(module, &mut leaves);
    let mut guard = CLAIMED.lock();
    let claimed = guard.get_or_insert_default();
    for (path, node) in &leaves.found {
        if let Some(peer) = claimed.get(node).filter(|peer| **peer != rank) {
            return Err(Error::SharedLeaf {
                path: path.clone(),
                rank,
                peer: *peer,
            });
        }
    }
    let nodes = leaves.found.into_iter().map(|(_, node)| node);
    let nodes: Vec<_> = nodes.filter(|node| !claimed.contains_key(node)).collect();
    claimed.extend(nodes.iter().map(|node| (*node, rank)));
    drop(guard);
    Ok(Claim(nodes))
}

/// Whether the gradient of any parameter of `module` is wanted, sharded or not.
pub(crate) fn is_any_trained<M: Module>(module: &M) -> bool {
    let mut leaves = Leaves::default();
    let members = inspect::visit(module, &mut leaves);
    let mut members = members.iter();
    !leaves.found.is_empty() || members.any(|member| member.generation.is_trainable(member.index))
}

#[derive(Default)]
struct Leaves {
    found: Vec<(String, NodeId)>,
}

impl path::Visitor for Leaves {
    fn float<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D>>) {
        if !param.is_initialized() {
            return;
        }
        // A stand-in takes no gradient.
        let value = param.base();
        if value.is_autodiff() && value.is_require_grad() {
            self.found.push((place.path(), op::node_of(value)));
        }
    }
}
