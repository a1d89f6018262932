//! The values that only one rank has, and the nodes that the other ranks skip.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{CustomOpIr, OperationIr, TensorId};

use super::{Graph, Node, Owner};
use crate::error::Error;

/// The values that a rank lacks, because another rank owns them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Absent(BTreeSet<TensorId>);

impl Absent {
    /// Returns true if the rank has all values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if the rank lacks this value.
    pub fn contains(&self, id: TensorId) -> bool {
        self.0.contains(&id)
    }

    /// Returns true if the rank skips a node. It skips a drop if it lacks the operand, and an all-reduce if it lacks
    /// all operands. It never skips other collectives, and skips any other node if it lacks a result.
    pub fn skips(&self, node: &Node) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let mut operands = node.inputs().chain(node.outputs());
        match (&node.collective, node.is_drop()) {
            (Some(collective), _) => {
                // Transfers to or from an owner involve all ranks along the axis of the owners.
                let contract = collective.kind.contract();
                contract.gives.share == contract.gets.share && operands.all(|id| self.contains(id))
            }
            (None, true) => operands.any(|id| self.contains(id)),
            (None, false) => node.outputs().any(|id| self.contains(id)),
        }
    }

    /// Returns the call of a custom operation with only the inputs that the rank has; `None` if it has all.
    pub fn without(&self, call: &CustomOpIr) -> Option<CustomOpIr> {
        if !call.inputs.iter().any(|input| self.contains(input.id)) {
            return None;
        }
        let mut call = call.clone();
        call.inputs.retain(|input| !self.contains(input.id));
        Some(call)
    }

    /// Returns a node with only the inputs that the rank has; `None` if it has all, or if the node is not a [custom
    /// operation](Self::without).
    pub fn node_without(&self, node: &Node) -> Option<Node> {
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
    /// Sets the owners of the values that only one rank has.
    pub(crate) fn set_owned(&mut self, owned: BTreeMap<TensorId, Owner>) {
        self.ranks.owned = owned;
    }

    /// Returns true if a parameter has an owner.
    pub(crate) fn has_owners(&self) -> bool {
        let mut parameters = self.parameters.iter();
        parameters.any(|parameter| parameter.layout.owner.is_some())
    }

    /// Returns the values that a rank lacks, because another rank owns them: it neither computes nor keeps them. Empty
    /// before the pass [`Liveness`](crate::passes::Liveness) has run.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] for a rank outside the mesh.
    pub fn absent_on(&self, rank: usize) -> Result<Absent, Error> {
        self.absent_of(rank, &self.ranks.owned)
    }

    /// Returns the owned values in `owned` that a rank lacks.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] for a rank outside the mesh.
    pub fn absent_of(
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
