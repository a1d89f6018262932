//! Where the values of a step are.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::Placement;
use burn_ir::TensorId;

use crate::graph::{AxisPlacement, Graph, Node};

/// One placement per axis.
pub(super) type On = Vec<Placement>;

/// A copy of a value that lies in some way.
#[derive(Debug, Clone)]
pub(super) struct Version {
    pub(super) id: TensorId,
    pub(super) on: On,
}

/// Where a value of the graph before is.
#[derive(Debug, Clone)]
pub(super) enum Located {
    /// It lies in one or more ways.
    Placed(Vec<Version>),
    /// It is made of nothing, by this node, once somebody wants it.
    Floating(Arc<Node>),
}

/// The values of a step, as far as it is placed.
pub(super) struct Values {
    /// The axes of the mesh, with nothing cut on them.
    pub(super) axes: Vec<AxisPlacement>,
    pub(super) graph: Graph,
    /// Shapes and types on one rank that has everything.
    pub(super) whole: HashMap<TensorId, (Vec<usize>, DType)>,
    pub(super) located: HashMap<TensorId, Located>,
}

impl Values {
    /// The placements with the axes that they are on.
    pub(super) fn described(&self, on: &On) -> Vec<AxisPlacement> {
        let axes = self.axes.iter().zip(on);
        axes.map(|(axis, placement)| AxisPlacement {
            placement: *placement,
            ..axis.clone()
        })
        .collect()
    }
}

/// The placements alone.
pub(super) fn on(placements: &[AxisPlacement]) -> On {
    placements.iter().map(|axis| axis.placement).collect()
}
