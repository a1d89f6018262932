//! Random numbers that a node draws from a seed.

use std::sync::Arc;

use burn_fsdp_mesh::{AxisPlacement, Placement};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr};

use super::shift::AxisShift;

/// Identifies a node's random numbers among all that a step draws from a seed. See
/// [`Mode::seeded`](crate::Mode::seeded).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The seed.
    pub seed: u64,
    /// Position among the draws of a step, in the order in which they were traced.
    pub number: u32,
    /// Shape of the whole draw; each rank takes a part of it.
    pub whole: Vec<usize>,
    /// The splits of the draw along mesh axes, each along a different dim; empty if every rank takes all of it.
    pub shifts: Vec<AxisShift>,
    /// True if each rank draws separate numbers for its rows.
    pub is_own: bool,
}

impl Draw {
    /// Splits the draw among ranks by the placements of the result.
    pub(crate) fn place(&mut self, placements: &[AxisPlacement]) {
        let mut local = self.whole.clone();
        self.shifts.clear();
        for of in placements.iter().filter(|of| of.num_ranks > 1) {
            if let Placement::Shard(dim) = of.placement {
                debug_assert!(
                    local[dim].is_multiple_of(of.num_ranks),
                    "draws are cut into equal parts"
                );
                local[dim] /= of.num_ranks;
                self.shifts.push(AxisShift {
                    axis: Arc::clone(&of.axis),
                    dim,
                    len: local[dim],
                });
            }
        }
    }

    /// Returns the start of a rank's part in each dim. `along` returns the rank's index on a mesh axis.
    ///
    /// # Errors
    ///
    /// The errors of `along`; a description of a draw that does not have a split dim.
    pub fn start(
        &self,
        along: impl Fn(&str) -> Result<usize, String>,
    ) -> Result<Vec<usize>, String> {
        let mut start = vec![0; self.whole.len()];
        for shift in &self.shifts {
            let start = start
                .get_mut(shift.dim)
                .ok_or("it does not have that dim")?;
            *start += along(&shift.axis)? * shift.len;
        }
        Ok(start)
    }
}

/// Returns the arguments of an operation that draws random numbers; `None` for other operations.
pub(crate) fn random_of(operation: &OperationIr) -> Option<&RandomOpIr> {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Random(op))
        | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(op))
        | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(op)) => Some(op),
        _ => None,
    }
}
