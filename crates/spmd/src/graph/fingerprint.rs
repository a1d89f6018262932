//! A hash of a graph, the same on every rank.

use std::hash::{Hash, Hasher};

use burn_fsdp_collectives::Fingerprint;

use burn_ir::{OperationIr, ScalarIr};

use super::{Graph, Node};

impl Graph {
    /// Returns a number that is equal for equal graphs on every process and rank. It covers schedule, shapes, roles,
    /// updates and the data of constants. It excludes scalars that change from step to step, so a graph has the same
    /// number on ranks that traced it at different steps.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = Fingerprint::new();
        for value in self.values.values() {
            (value.id, &value.shape, &value.role).hash(&mut hasher);
        }
        for node in &self.nodes {
            if node.scalars.is_empty() {
                node.operation.hash(&mut hasher)
            } else {
                without_slots(node).hash(&mut hasher)
            }
            (node.phase, &node.scalars, &node.shift, &node.draw).hash(&mut hasher);
            if let Some(collective) = &node.collective {
                (&collective.label, collective.kind, collective.stage).hash(&mut hasher);
                let reduction = collective.reduction.map(|op| op.to_string());
                (&collective.axis, reduction, collective.payload).hash(&mut hasher);
                let parts = collective.parts.iter();
                let owners = parts.filter_map(|part| part.partition.sole_owner());
                owners.for_each(|owner| owner.hash(&mut hasher));
            }
        }
        for update in &self.updates {
            (update.into, update.from).hash(&mut hasher);
        }
        for (id, data) in &self.constants {
            (id, data.shape().to_vec(), format!("{:?}", data.dtype())).hash(&mut hasher);
            data.as_bytes().hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// Returns the operation of a node with zeros for the scalars that change from step to step.
fn without_slots(node: &Node) -> OperationIr {
    let mut scalars = node.scalar_values();
    for slot in &node.scalars {
        if let Some(own) = scalars.get_mut(slot.first..slot.first + slot.len) {
            own.fill(ScalarIr::UInt(0));
        }
    }
    let mut node = Node::new(node.operation.clone(), node.phase);
    node.set_scalar_values(&scalars);
    node.operation
}
