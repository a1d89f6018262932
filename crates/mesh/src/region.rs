//! Subsets of a tensor's elements: a flat range, or a box.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A subset of a tensor's elements, stored and read in row-major order.
///
/// Rows of dim 0 are contiguous in row-major order, so both a flat shard and a shard of dim 0 are
/// [`Flat`](Self::Flat). Shards of other dims are boxes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// A range of elements, counted in row-major order over the whole tensor.
    Flat(Range<usize>),
    /// A box: along every dim `d`, the indices `offsets[d]..offsets[d] + sizes[d]`.
    Box {
        /// The first index along each dim.
        offsets: Vec<usize>,
        /// The number of indices along each dim.
        sizes: Vec<usize>,
    },
}

impl Region {
    /// Returns the region of all elements of a tensor of this shape.
    ///
    /// Saturates if the shape has more elements than fit in a `usize`, which does not occur in checkpoints.
    pub fn whole(shape: &[usize]) -> Self {
        Self::Flat(0..num_elements(shape).unwrap_or(usize::MAX))
    }

    /// Returns the number of elements. Saturates if a box has more than fit in a `usize`.
    pub fn len(&self) -> usize {
        match self {
            Self::Flat(range) => range.len(),
            Self::Box { sizes, .. } => num_elements(sizes).unwrap_or(usize::MAX),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the shape in which the elements are stored: a box's sizes, the tensor's shape with fewer rows for whole
    /// rows, and one dim for any other range.
    pub fn stored_shape(&self, shape: &[usize]) -> Vec<usize> {
        match self {
            Self::Box { sizes, .. } => sizes.clone(),
            Self::Flat(range) if *range == (0..num_elements(shape).unwrap_or(usize::MAX)) => {
                shape.to_vec()
            }
            Self::Flat(range) => {
                let row_len = shape.get(1..).and_then(num_elements).unwrap_or(0);
                let is_rows = row_len > 0
                    && range.start.is_multiple_of(row_len)
                    && range.end.is_multiple_of(row_len);
                if !is_rows {
                    return vec![range.len()];
                }
                let mut stored = shape.to_vec();
                stored[0] = range.len() / row_len;
                stored
            }
        }
    }

    /// Checks that this is a region of a tensor of this shape, and that the tensor's number of elements fits in a
    /// `usize`.
    ///
    /// # Errors
    ///
    /// A description of the problem.
    pub fn check(&self, shape: &[usize]) -> Result<(), String> {
        match self {
            Self::Flat(range) => {
                let total =
                    num_elements(shape).ok_or("the shape has more elements than fit in a usize")?;
                if range.start > range.end || range.end > total {
                    return Err(format!("the tensor has {total} elements"));
                }
            }
            Self::Box { offsets, sizes } => {
                if offsets.len() != shape.len() || sizes.len() != shape.len() {
                    return Err(format!("the tensor has {} dims", shape.len()));
                }
                for (dim, full) in shape.iter().enumerate() {
                    let end = offsets[dim].checked_add(sizes[dim]);
                    if end.is_none_or(|end| end > *full) {
                        return Err(format!("dim {dim} has {full} indices"));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Prints as `elements 0..12` or `box [0..4, 2..6]`.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flat(range) => write!(f, "elements {}..{}", range.start, range.end),
            Self::Box { offsets, sizes } => {
                f.write_str("box [")?;
                for (dim, (offset, size)) in offsets.iter().zip(sizes).enumerate() {
                    let comma = if dim == 0 { "" } else { ", " };
                    write!(f, "{comma}{offset}..{}", offset.saturating_add(*size))?;
                }
                f.write_str("]")
            }
        }
    }
}

/// Returns the product of a shape if it fits in a `usize`. An empty dim makes it 0, whatever the other dims are.
pub fn num_elements(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim))
}
