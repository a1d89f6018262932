//! The random numbers of a seed that a node draws.

use std::sync::Arc;

use burn_fsdp_mesh::{AxisPlacement, Placement};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr};

use super::Graph;
use super::node::{AxisShift, Node, Phase};

/// The place of random numbers among all that a step of a seed draws. See [`Mode::seeded`](crate::Mode::seeded).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The seed.
    pub seed: u64,
    /// Number among the draws of a step, in the order in which they were traced.
    pub number: u32,
    /// Shape of what is drawn, of which ranks take parts.
    pub whole: Vec<usize>,
    /// The parts that a rank takes, one cut after the other; empty where it takes all.
    pub shifts: Vec<AxisShift>,
    /// True if every rank draws for rows of its own, and numbers of its own for them.
    pub is_own: bool,
}

impl Draw {
    /// Cuts what is drawn for each rank as the result lies.
    pub(crate) fn place(&mut self, placements: &[AxisPlacement]) {
        let mut local = self.whole.clone();
        self.shifts.clear();
        for of in placements.iter().filter(|of| of.num_ranks > 1) {
            if let Placement::Shard(dim) = of.placement {
                local[dim] /= of.num_ranks;
                self.shifts.push(AxisShift {
                    axis: Arc::clone(&of.axis),
                    dim,
                    len: local[dim],
                });
            }
        }
    }
}

impl Graph {
    /// Says of a traced step which random numbers each node draws. Those of the optimizer stay the backend's.
    pub(crate) fn with_draws(mut self, seed: u64, is_own: bool) -> Self {
        let mut nodes = self.take_nodes();
        let drawing = nodes.iter_mut().filter(|node| draws(node));
        for (number, node) in (0..).zip(drawing) {
            let out = node.operation.outputs().next();
            let whole = out.map_or_else(Vec::new, |out| out.shape.to_vec());
            node.draw = Some(Draw {
                seed,
                number,
                whole,
                shifts: Vec::new(),
                is_own,
            });
        }
        self.set_nodes(nodes);
        self
    }
}

/// Returns true for a node that draws random numbers for the loss or its gradients.
fn draws(node: &Node) -> bool {
    let is_random = matches!(
        node.operation,
        OperationIr::Float(_, FloatOperationIr::Random(_))
            | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(_))
            | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
    );
    is_random && node.phase != Phase::Optimizer
}
