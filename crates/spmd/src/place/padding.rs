//! Padding of parts that are not equal.
//!
//! Of a dim that does not divide, every rank holds as many rows as the first: the size of the whole over the number of
//! ranks, rounded up, as `torch.chunk` cuts it. The last ranks have fewer rows, and padding behind them, so that one graph
//! is that of all ranks. **What is in padding means nothing**, and three rules keep it where it is:
//!
//! 1. Operations that know each element along the dim by itself run on padding as on any row: what they make of it is
//!    padding again.
//! 2. What is summed over the dim has its padding cleared in every operand that is summed, and
//!    so have gradients of parameters, of which norms are taken. Nothing else that combines rows runs on parts.
//! 3. A value that is gathered is trimmed to its size, and one that is cut, scattered or exchanged is
//!    lengthened before, by elements of its own.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn_fsdp_mesh::Placement;
use burn_ir::TensorId;

use super::located::{On, Reader};
use crate::graph::AxisPlacement;

/// What was made of padding so far.
#[derive(Default)]
pub(super) struct Padding {
    /// The placements of values that were lengthened, of which no other copy is noted.
    pub(super) lengthened: BTreeMap<TensorId, On>,
    /// Copies that were cleared along a dim for a reader: what one phase has made need not be there in another, nor in the part of
    /// the optimizer of one parameter what that of another has made.
    pub(super) cleared: HashMap<(TensorId, usize, Reader), TensorId>,
    /// Masks, in the shape of the part that they are for.
    pub(super) masks: HashMap<Mask, TensorId>,
}

/// What a mask of padding depends on.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Mask {
    pub(super) axis: Arc<str>,
    /// Shape of the part of a rank.
    pub(super) part: Vec<usize>,
    pub(super) dim: usize,
    /// Size of the whole dim.
    pub(super) size: usize,
    pub(super) reader: Reader,
}

/// Returns the dim of a tensor of this shape whose parts on an axis have padding: one that is cut and does not divide.
pub(super) fn padded_dim(axis: &AxisPlacement, shape: &[usize]) -> Option<usize> {
    let Placement::Shard(dim) = axis.placement else {
        return None;
    };
    let size = shape.get(dim)?;
    (!size.is_multiple_of(axis.num_ranks)).then_some(dim)
}
