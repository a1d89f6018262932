//! The strides of a tensor: the order of its elements in memory.

/// A tensor's shape, strides and offset, as in Burn's CPU backend. Strides and offset are in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Strides {
    pub(crate) shape: Vec<usize>,
    strides: Vec<isize>,
    offset: usize,
}

/// Maximum number of dims that the backend's two-operand loops support.
const MAX_DIMS: usize = 8;

impl Strides {
    /// Returns the row-major strides of a shape, with offset 0.
    pub(crate) fn contiguous(shape: &[usize]) -> Self {
        let mut strides = vec![1; shape.len()];
        for dim in (0..shape.len().saturating_sub(1)).rev() {
            strides[dim] = strides[dim + 1] * shape[dim + 1] as isize;
        }
        Self {
            shape: shape.to_vec(),
            strides,
            offset: 0,
        }
    }

    pub(crate) fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if the elements are in row-major order without gaps. A stride of zero is a gap, even for a dim of
    /// size 1.
    pub(crate) fn is_contiguous(&self) -> bool {
        if self.shape.is_empty() || self.num_elements() == 0 {
            return true;
        }
        self.strides.iter().all(|stride| *stride > 0) && self.is_dense()
    }

    /// Returns true if the elements are contiguous from the start of the memory.
    pub(crate) fn is_from_start(&self) -> bool {
        self.offset == 0 && self.is_contiguous()
    }

    /// Returns true if a loop over this operand and `other`, which has the same shape, visits this operand in memory
    /// order from the start. The result can then overwrite this operand.
    pub(crate) fn is_dense_beside(&self, other: &Self) -> bool {
        let strides = self.strides.iter().chain(&other.strides);
        self.shape.len() <= MAX_DIMS
            && strides.copied().all(|stride| stride >= 0)
            && self.offset == 0
            && self.is_dense()
    }

    /// Returns true if every stride is the product of the sizes of the later dims. Strides of dims
    /// of size 1 do not matter.
    fn is_dense(&self) -> bool {
        let mut expected = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size == 1 {
                continue;
            }
            if *stride != expected {
                return false;
            }
            expected *= *size as isize;
        }
        true
    }

    /// Returns true if the tensor contains all `num_elements` elements of its memory, from the start and in any
    /// order.
    pub(crate) fn covers(&self, num_elements: usize) -> bool {
        self.offset == 0
            && self.num_elements() == num_elements
            && self.strides.iter().all(|stride| *stride >= 0)
    }

    pub(crate) fn swapped(&self, dim1: usize, dim2: usize) -> Self {
        let mut strides = self.clone();
        strides.shape.swap(dim1, dim2);
        strides.strides.swap(dim1, dim2);
        strides
    }

    pub(crate) fn permuted(&self, axes: &[usize]) -> Self {
        Self {
            shape: axes.iter().map(|axis| self.shape[*axis]).collect(),
            strides: axes.iter().map(|axis| self.strides[*axis]).collect(),
            offset: self.offset,
        }
    }

    /// Returns the strides after an expansion to `shape`. Expanded dims and new leading dims have stride 0.
    pub(crate) fn expanded(&self, shape: &[usize]) -> Self {
        let new = shape.len().saturating_sub(self.shape.len());
        let strides = shape.iter().enumerate().map(|(dim, size)| {
            let old = dim.checked_sub(new);
            match old.and_then(|old| Some((*self.shape.get(old)?, self.strides[old]))) {
                Some((old, stride)) if old == *size => stride,
                _ => 0,
            }
        });
        Self {
            shape: shape.to_vec(),
            strides: strides.collect(),
            offset: self.offset,
        }
    }

    /// Returns the strides of the same elements in another shape, or `None` if reshaping needs a copy.
    pub(crate) fn reshaped(&self, shape: &[usize]) -> Option<Self> {
        self.is_contiguous().then(|| Self {
            offset: self.offset,
            ..Self::contiguous(shape)
        })
    }

    /// Returns the strides of a slice. `starts` has a start and a step for each dim.
    pub(crate) fn sliced(&self, shape: &[usize], starts: &[(usize, isize)]) -> Self {
        let mut strides = self.clone();
        strides.shape = shape.to_vec();
        let is_empty = strides.num_elements() == 0;
        for (dim, (start, step)) in starts.iter().enumerate() {
            let stride = strides.strides[dim];
            if !is_empty {
                let offset = strides.offset as isize + stride * *start as isize;
                strides.offset = offset.max(0) as usize;
            }
            strides.strides[dim] = stride * step;
        }
        strides
    }

    /// Returns the strides of windows over `dim` at intervals of `step`. The new last dim is the position in a window.
    pub(crate) fn unfolded(&self, shape: &[usize], dim: usize, step: usize) -> Self {
        let mut strides = self.clone();
        let stride = strides.strides[dim];
        strides.strides[dim] = stride * step as isize;
        strides.strides.push(stride);
        strides.shape = shape.to_vec();
        strides
    }
}

/// Returns the common shape to which two operands are broadcast.
pub(crate) fn broadcast(lhs: &[usize], rhs: &[usize]) -> Vec<usize> {
    let num_dims = lhs.len().max(rhs.len());
    let size = |shape: &[usize], dim: usize| {
        let new = num_dims - shape.len();
        if dim < new { 1 } else { shape[dim - new] }
    };
    (0..num_dims)
        .map(|dim| match (size(lhs, dim), size(rhs, dim)) {
            (1, rhs) => rhs,
            (lhs, _) => lhs,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_contiguous_as_in_the_backend() {
        let strides = Strides::contiguous(&[2, 3, 4]);
        assert!(strides.is_from_start());
        assert!(!strides.swapped(0, 1).is_contiguous());
        assert!(strides.swapped(1, 1).is_contiguous());
        let row = strides.sliced(&[1, 3, 4], &[(1, 1)]);
        assert!(row.is_contiguous() && !row.is_from_start());
        assert!(row.reshaped(&[12]).is_some());
        assert!(
            !strides
                .sliced(&[2, 3, 2], &[(0, 1), (0, 1), (2, 1)])
                .is_contiguous()
        );
    }

    #[test]
    fn expanded_dims_are_not_dense_unless_of_size_one() {
        let vector = Strides::contiguous(&[4]);
        let matrix = Strides::contiguous(&[3, 4]);
        assert!(!vector.expanded(&[3, 4]).is_dense_beside(&matrix));
        let row = vector.expanded(&[1, 4]);
        assert!(row.is_dense_beside(&Strides::contiguous(&[1, 4])));
        assert!(!row.is_contiguous());
        assert!(matrix.is_dense_beside(&vector.expanded(&[3, 4])));
    }

    #[test]
    fn broadcasting_aligns_the_last_dims() {
        assert_eq!(broadcast(&[4, 1], &[2, 1, 3]), [2, 4, 3]);
    }
}
