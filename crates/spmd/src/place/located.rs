//! The placements of the values of a step that is being placed.

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

/// The copies of a value of the graph before.
#[derive(Debug, Clone)]
pub(super) enum Located {
    /// Copies that exist, each with its placements.
    Placed(Vec<Version>),
    /// No copy yet: this node, a constant, random or other deferred one, is emitted when a reader needs the value.
    Floating(Arc<Node>),
}

/// The values of a step that is being placed.
pub(super) struct Values {
    /// The axes of the mesh, with nothing cut on them.
    pub(super) axes: Vec<AxisPlacement>,
    pub(super) graph: Graph,
    /// Shapes and types on one rank that has everything.
    pub(super) whole: HashMap<TensorId, (Vec<usize>, DType)>,
    pub(super) located: HashMap<TensorId, Located>,
    /// The placements that are asked of a value, on the axes where they are: of a named activation, and of what it is
    /// computed of element by element.
    pub(super) asked: HashMap<TensorId, Vec<Option<Placement>>>,
    /// For each axis, whether the user's placements cut a dim on it that does not divide.
    pub(super) is_padded: Vec<bool>,
}

impl Values {
    /// Returns the placements with the axes that they are on.
    pub(super) fn described(&self, on: &On) -> Vec<AxisPlacement> {
        let axes = self.axes.iter().zip(on);
        axes.map(|(axis, placement)| AxisPlacement {
            placement: *placement,
            ..axis.clone()
        })
        .collect()
    }
}

/// Returns the placements alone.
pub(super) fn on(placements: &[AxisPlacement]) -> On {
    placements.iter().map(|axis| axis.placement).collect()
}

/// The node for which a value is redistributed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Reader {
    pub(super) phase: Phase,
    /// Path of the parameter that the node serves.
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
