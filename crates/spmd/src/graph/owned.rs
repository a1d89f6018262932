//! The values that one rank has alone, and what the other ranks leave out.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{CustomOpIr, OperationIr, TensorId};

use super::{Graph, Node, Owner};
use crate::error::Error;

/// The values that a rank has not, since another one owns them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Absent(BTreeSet<TensorId>);

impl Absent {
    /// Returns true if the rank has all values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if the rank has not this value.
    pub fn contains(&self, id: TensorId) -> bool {
        self.0.contains(&id)
    }

    /// Returns true if the rank leaves a node out: a combination of copies of which it has none, or any other
    /// node but collectives whose results, or of a drop whose operand, it has not.
    pub fn skips(&self, node: &Node) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let mut operands = node.inputs().chain(node.outputs());
        match (&node.collective, node.is_drop()) {
            (Some(collective), _) => {
                // What goes to an owner, or comes from one, is for the ranks along the axis of the owners.
                let contract = collective.kind.contract();
                contract.gives.share == contract.gets.share && operands.all(|id| self.contains(id))
            }
            (None, true) => operands.any(|id| self.contains(id)),
            (None, false) => node.outputs().any(|id| self.contains(id)),
        }
    }

    /// Returns the call of an operation that is not Burn's with the operands that the rank has; `None` if it has all.
    pub fn without(&self, call: &CustomOpIr) -> Option<CustomOpIr> {
        if !call.inputs.iter().any(|input| self.contains(input.id)) {
            return None;
        }
        let mut call = call.clone();
        call.inputs.retain(|input| !self.contains(input.id));
        Some(call)
    }

    /// Returns a node with the operands that the rank has; `None` if it has all, or is not of a [custom
    /// operation](Self::without).
    pub(crate) fn node_without(&self, node: &Node) -> Option<Node> {
        match &node.operation {
            OperationIr::Custom(call) if node.collective.is_none() => {
                let mut own = node.clone();
                own.operation = OperationIr::Custom(self.without(call)?);
                Some(own)
            }
            _ => None,
        }
    }
}

impl Graph {
    /// Declares the values that have an owner.
    pub(crate) fn set_owned(&mut self, owned: BTreeMap<TensorId, Owner>) {
        self.ranks.owned = owned;
    }

    /// Returns true if a parameter has an owner.
    pub(crate) fn has_owners(&self) -> bool {
        let mut parameters = self.parameters.iter();
        parameters.any(|parameter| parameter.layout.owner.is_some())
    }

    /// Returns the values that a rank has not, since another one owns them: what it neither computes nor keeps. They are
    /// known behind the pass [`Liveness`](crate::passes::Liveness).
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] for a rank that the mesh has not.
    pub fn absent_on(&self, rank: usize) -> Result<Absent, Error> {
        self.absent_of(rank, &self.ranks.owned)
    }

    /// Returns those of some values with owners that a rank has not.
    pub(crate) fn absent_of(
        &self,
        rank: usize,
        owned: &BTreeMap<TensorId, Owner>,
    ) -> Result<Absent, Error> {
        let Some(mesh) = self.mesh().filter(|_| !owned.is_empty()) else {
            return Ok(Absent::default());
        };
        let mut absent = BTreeSet::new();
        for (id, owner) in owned {
            if mesh.index_on(&owner.axis, rank)? != owner.index {
                absent.insert(*id);
            }
        }
        Ok(Absent(absent))
    }
}
