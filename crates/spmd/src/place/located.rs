//! The copies of each value while a step is being placed.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::Placement;
use burn_ir::TensorId;

use crate::graph::{AxisPlacement, Graph, Node, Phase};

/// The placements of a value, one per axis.
pub(super) type On = Vec<Placement>;

/// A copy of a value with given placements.
#[derive(Debug, Clone)]
pub(super) struct Version {
    pub(super) id: TensorId,
    pub(super) on: On,
}

/// Where to find a value of the original graph.
#[derive(Debug, Clone)]
pub(super) enum Located {
    /// Existing copies, each with its placements.
    Placed(Vec<Version>),
    /// No copy yet. The node, which creates for example a constant or random numbers, is emitted when a reader needs
    /// the value.
    Floating(Arc<Node>),
}

/// The values of a step while it is being placed.
pub(super) struct Values {
    /// The mesh axes, all with the placement `Replicate`.
    pub(super) axes: Vec<AxisPlacement>,
    pub(super) graph: Graph,
    /// Shape and type of each whole value.
    pub(super) whole: HashMap<TensorId, (Vec<usize>, DType)>,
    pub(super) located: HashMap<TensorId, Located>,
    /// The requested placements of named activations, and of the values from which they are computed element by
    /// element.
    pub(super) asked: HashMap<TensorId, Vec<Option<Placement>>>,
    /// For each axis, whether the user's placements shard a dim on it that does not divide evenly.
    pub(super) is_padded: Vec<bool>,
}

impl Values {
    /// Returns the placements together with their axes.
    pub(super) fn described(&self, on: &On) -> Vec<AxisPlacement> {
        let axes = self.axes.iter().zip(on);
        axes.map(|(axis, placement)| AxisPlacement {
            placement: *placement,
            ..axis.clone()
        })
        .collect()
    }
}

/// Returns the placements without their axes.
pub(super) fn on(placements: &[AxisPlacement]) -> On {
    placements.iter().map(|axis| axis.placement).collect()
}

/// The node for which a value is redistributed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Reader {
    pub(super) phase: Phase,
    /// Path of the parameter that the node belongs to.
    pub(super) path: Option<Arc<str>>,
}

impl Reader {
    pub(super) fn of(node: &Node) -> Self {
        Self {
            phase: node.phase,
            path: node.path.clone(),
        }
    }
}
