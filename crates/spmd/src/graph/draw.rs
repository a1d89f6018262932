//! The random numbers of a seed that a node draws.

use std::sync::Arc;

use burn_fsdp_mesh::{AxisPlacement, Placement};

use super::shift::AxisShift;

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
