//! One number for a graph, the same on every rank.

use std::hash::{Hash, Hasher};

use burn_fsdp_collectives::Fingerprint;

use super::Graph;

impl Graph {
    /// Returns a number that is equal for equal graphs, whatever the process or rank. It covers schedule, shapes,
    /// roles, updates and the data of constants.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = Fingerprint::new();
        for value in self.values.values() {
            (value.id, &value.shape, &value.role).hash(&mut hasher);
        }
        for node in &self.nodes {
            node.operation.hash(&mut hasher);
            (node.phase, &node.scalars, &node.shift).hash(&mut hasher);
            if let Some(collective) = &node.collective {
                (&collective.label, collective.kind, collective.stage).hash(&mut hasher);
                let reduction = collective.reduction.map(|op| op.to_string());
                (&collective.axis, reduction, collective.payload).hash(&mut hasher);
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
