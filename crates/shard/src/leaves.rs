//! The parameters that a backward may reach, and the check that no other rank waits for one of them.
//!
//! Ranks that share an autodiff leaf would wait for each other's backward.
//!
//! Burn locks all graphs that share a leaf during the backward of any of them. If ranks are threads and hold clones of
//! one parameter, they would block each other, each in the middle of operations that need the other. Managed and
//! ignored parameters get a separate leaf on each rank. The engine finds other parameters only in the first backward.
//! By then, another rank may have locked a graph that a rank still in its forward needs, so each rank first waits
//! briefly for the others. If that is not enough, because their routes differ, the process group's deadline ends the
//! wait.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use parking_lot::{Condvar, Mutex};

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::op;
use crate::path::{self, Location};

/// For each claimed leaf, the rank of this process that uses it in its current backward.
static CLAIMED: Mutex<Option<HashMap<NodeId, usize>>> = Mutex::new(None);

/// The signal that a rank has claimed its leaves.
static HAS_CLAIMED: Condvar = Condvar::new();

/// Maximum time that a rank's first backward waits for the other ranks to begin theirs.
const FOR_OTHERS: Duration = Duration::from_secs(1);

/// Leaves that belong to this rank until the claim is dropped.
pub(crate) struct Claim(Vec<NodeId>);

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock();
        for node in &self.0 {
            claimed.get_or_insert_default().remove(node);
        }
    }
}

/// Claims, for rank `rank` of `num_ranks`, the leaves of a module that no unit manages. If there are any, returns once
/// all ranks have claimed theirs, or after a short time.
///
/// # Errors
///
/// [`Error::SharedLeaf`] if another rank of this process has claimed one of them.
pub(crate) fn claim(leaves: &[Leaf], rank: usize, num_ranks: usize) -> Result<Claim, Error> {
    let mut guard = CLAIMED.lock();
    let claimed = guard.get_or_insert_default();
    for Leaf { path, node, .. } in leaves {
        if let Some(peer) = claimed.get(node).filter(|peer| **peer != rank) {
            return Err(Error::SharedLeaf {
                path: path.clone(),
                rank,
                peer: *peer,
            });
        }
    }
    let nodes = leaves.iter().map(|leaf| leaf.node);
    let nodes: Vec<_> = nodes.filter(|node| !claimed.contains_key(node)).collect();
    claimed.extend(nodes.iter().map(|node| (*node, rank)));
    if !nodes.is_empty() {
        HAS_CLAIMED.notify_all();
        let until = Instant::now() + FOR_OTHERS;
        let has_all = |claimed: &HashMap<NodeId, usize>| {
            claimed.values().collect::<HashSet<_>>().len() >= num_ranks
        };
        while !has_all(guard.get_or_insert_default())
            && !HAS_CLAIMED.wait_until(&mut guard, until).timed_out()
        {}
    }
    drop(guard);
    Ok(Claim(nodes))
}

/// A trained parameter of a module that is not a stand-in for a shard.
pub(crate) struct Leaf {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) is_empty: bool,
    node: NodeId,
    /// Returns true if the gradients contain this parameter's.
    has_gradient: fn(&GradientsParams, ParamId) -> bool,
}

impl Leaf {
    pub(crate) fn has_gradient(&self, gradients: &GradientsParams) -> bool {
        (self.has_gradient)(gradients, self.id)
    }
}

/// The parameters of a module that a backward may reach, found in one walk.
pub(crate) struct Reachable {
    /// The sharded parameters, as [`inspect::members`] returns them.
    pub(crate) members: Vec<Member>,
    pub(crate) leaves: Vec<Leaf>,
}

impl Reachable {
    pub(crate) fn of<M: Module>(module: &M) -> Self {
        let mut leaves = Leaves::default();
        let mut members = inspect::visit(module, &mut leaves);
        members.retain(|member| !member.is_tied);
        Self {
            members,
            leaves: leaves.found,
        }
    }

    /// Returns true if any parameter, sharded or not, requires a gradient.
    pub(crate) fn is_any_trained(&self) -> bool {
        let mut members = self.members.iter();
        !self.leaves.is_empty()
            || members.any(|member| member.generation.is_trainable(member.index))
    }
}

#[derive(Default)]
struct Leaves {
    found: Vec<Leaf>,
}

impl path::Visitor for Leaves {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        if !param.is_initialized() {
            return;
        }
        // A stand-in has no gradient.
        let value = param.base();
        if value.is_autodiff() && value.is_require_grad() {
            self.found.push(Leaf {
                path: place.path(),
                id: param.id,
                is_empty: value.shape().num_elements() == 0,
                node: op::node_of(value),
                has_gradient: |gradients, id| gradients.get::<D>(id).is_some(),
            });
        }
    }
}
