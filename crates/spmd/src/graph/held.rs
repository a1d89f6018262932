//! The values of a graph that are kept after its last node.

use std::collections::BTreeSet;

use burn_ir::TensorId;

use super::{Carried, Graph, Node, Role};

impl Graph {
    /// Declares the placements of a value that is carried over to the next step.
    pub(crate) fn carry(&mut self, id: TensorId, carried: Carried) {
        self.ranks.carried.insert(id, carried);
    }

    /// Returns the placements of a value that is carried over to the next step.
    pub(crate) fn carried(&self, id: TensorId) -> Option<&Carried> {
        self.ranks.carried.get(&id)
    }

    /// Returns the pending values that nodes read, but that no update replaces or carries over. Nothing reads them
    /// after this step.
    pub fn used_up(&self) -> Vec<TensorId> {
        let is_pending = |id: &TensorId| {
            let value = self.values.get(id);
            value.is_some_and(|value| matches!(value.role, Role::Pending(_)))
        };
        let read: BTreeSet<TensorId> = self.nodes.iter().flat_map(Node::inputs).collect();
        let updates = self.updates.iter();
        let updated: BTreeSet<TensorId> = updates.flat_map(|u| [u.into, u.from]).collect();
        let read = read.into_iter().filter(is_pending);
        read.filter(|id| !updated.contains(id)).collect()
    }

    /// Returns the values that must outlive the last node: the results, values with requested placements, the sources
    /// of all updates, and given values that the next step reads again. The latter exclude inputs and values that are
    /// updated or [used up](Self::used_up).
    pub fn kept(&self) -> BTreeSet<TensorId> {
        let replaced: BTreeSet<_> = self.updates.iter().map(|u| u.into).collect();
        let used: BTreeSet<_> = self.used_up().into_iter().collect();
        let given = self.values.values().filter(|v| match v.role {
            Role::Input(_) => false,
            _ => v.role.is_given() && !replaced.contains(&v.id) && !used.contains(&v.id),
        });
        given
            .map(|v| v.id)
            .chain(self.results())
            .chain(self.activations())
            .chain(self.updates.iter().map(|u| u.from))
            .collect()
    }
}
