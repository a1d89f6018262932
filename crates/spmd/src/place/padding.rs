//! Padding of unequal parts.
//!
//! A dim that does not divide evenly is split as by `torch.chunk`. Every rank holds as many rows as the first: the
//! whole size divided by the number of ranks, rounded up. The last ranks have fewer real rows, followed by padding, so
//! all ranks share one graph. **Padding has no meaning**, and three rules keep it separate:
//!
//! 1. Operations that treat each element along the dim independently also run on padding. Results there are padding.
//! 2. Before a sum over the dim, the padding of every summed operand is cleared. The padding of parameters' gradients
//!    is also cleared, because norms include them. No other operation that combines rows may run on parts.
//! 3. A value is trimmed to its size after it is gathered. Before it is sliced, scattered or exchanged, it is padded
//!    with copies of its first elements.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn_fsdp_mesh::Placement;
use burn_ir::TensorId;

use super::located::{On, Reader};
use crate::graph::AxisPlacement;

/// The values created for padding so far.
#[derive(Default)]
pub(super) struct Padding {
    /// The placements of padded whole values, which are not recorded as copies.
    pub(super) lengthened: BTreeMap<TensorId, On>,
    /// Copies whose padding was cleared along a dim for a reader. Other phases, and the optimizer's nodes for other
    /// parameters, may not be able to read them.
    pub(super) cleared: HashMap<(TensorId, usize, Reader), TensorId>,
    /// Masks of padding.
    pub(super) masks: HashMap<Mask, TensorId>,
}

/// The properties that determine a mask of padding.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Mask {
    pub(super) axis: Arc<str>,
    /// Shape of a rank's part.
    pub(super) part: Vec<usize>,
    pub(super) dim: usize,
    /// Size of the whole dim.
    pub(super) size: usize,
    pub(super) reader: Reader,
}

/// Returns the dim along which a tensor of this shape is sharded on an axis, if it does not divide evenly.
pub(super) fn padded_dim(axis: &AxisPlacement, shape: &[usize]) -> Option<usize> {
    let Placement::Shard(dim) = axis.placement else {
        return None;
    };
    let size = shape.get(dim)?;
    (!size.is_multiple_of(axis.num_ranks)).then_some(dim)
}
