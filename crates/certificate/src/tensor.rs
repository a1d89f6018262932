//! Tensors whose elements are exact.

use std::sync::Arc;

use super::field::{Element, Hash, order};

/// The representation of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Floats of any width: elements of the field.
    Float,
    /// Integers: the bits of an `i64`.
    Int,
    /// Booleans: 0 or 1.
    Bool,
}

impl Kind {
    pub(super) fn of(dtype: burn::tensor::DType) -> Self {
        if dtype.is_float() {
            Self::Float
        } else if dtype.is_bool() {
            Self::Bool
        } else {
            Self::Int
        }
    }

    /// Returns a number that orders elements of this kind.
    pub(super) fn order(self, element: Element) -> i64 {
        match self {
            Self::Float => order(element),
            Self::Int | Self::Bool => element as i64,
        }
    }
}

/// A tensor in row-major order. Clones share the elements.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor<E = Element> {
    pub(super) shape: Vec<usize>,
    pub(super) elements: Arc<Vec<E>>,
}

impl<E: Copy> Tensor<E> {
    pub(super) fn new(shape: impl Into<Vec<usize>>, elements: Vec<E>) -> Self {
        let shape = shape.into();
        debug_assert_eq!(shape.iter().product::<usize>(), elements.len());
        Self {
            shape,
            elements: Arc::new(elements),
        }
    }

    /// Creates a tensor from a function of the flat index.
    pub(super) fn from_fn(shape: &[usize], of: impl FnMut(usize) -> E) -> Self {
        let len = shape.iter().product();
        Self::new(shape, (0..len).map(of).collect())
    }

    pub(super) fn full(shape: &[usize], element: E) -> Self {
        Self::from_fn(shape, |_| element)
    }

    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns the tensor in another shape with the same number of elements.
    pub(super) fn reshaped(&self, shape: &[usize]) -> Result<Self, String> {
        let len: usize = shape.iter().product();
        if len == self.len() {
            Ok(Self {
                shape: shape.to_vec(),
                elements: self.elements.clone(),
            })
        } else {
            Err(format!("{:?} cannot have shape {shape:?}", self.shape))
        }
    }

    /// Copies the elements of a view into a tensor.
    pub(super) fn taken(&self, view: &View) -> Self {
        let elements = view.places().into_iter().map(|at| self.elements[at]);
        Self::new(view.shape.clone(), elements.collect())
    }

    /// Returns a view of the whole tensor.
    pub(super) fn view(&self) -> View {
        View {
            strides: strides(&self.shape),
            shape: self.shape.clone(),
            start: 0,
        }
    }

    /// Returns the tensor expanded to `shape`: dims of one element are repeated, and missing dims are added in front.
    pub(super) fn expanded(&self, shape: &[usize]) -> Result<Self, String> {
        if self.shape == shape {
            Ok(self.clone())
        } else {
            Ok(self.taken(&self.view().expanded(shape)?))
        }
    }
}

impl Tensor {
    /// Returns a hash of all elements and the shape.
    pub(super) fn hash(&self) -> u64 {
        let mut hash = Hash::named("tensor");
        self.shape.iter().for_each(|dim| hash.write(*dim as u64));
        self.elements
            .iter()
            .for_each(|element| hash.write(*element));
        hash.finish()
    }
}

/// Returns a tensor of pseudorandom elements from a seed.
pub(super) fn filled(seed: Hash, shape: &[usize], kind: Kind) -> Tensor {
    /// Integers are small, like indices.
    const INTEGERS: u64 = 1 << 16;
    Tensor::from_fn(shape, |index| {
        let mut hash = seed;
        hash.write(index as u64);
        let element = hash.finish();
        match kind {
            Kind::Float => element,
            Kind::Int => element % INTEGERS,
            Kind::Bool => element & 1,
        }
    })
}

/// Returns the row-major stride of each dim, in elements.
pub(super) fn strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim] as isize;
    }
    strides
}

/// A strided view: the flat indices of its elements in another tensor.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<isize>,
    pub(super) start: isize,
}

impl View {
    /// Returns the flat indices of the elements, in row-major order.
    pub(super) fn places(&self) -> Vec<usize> {
        let mut places = vec![self.start];
        for (len, stride) in self.shape.iter().zip(&self.strides) {
            let along = |first: isize| (0..*len as isize).map(move |index| first + index * stride);
            places = places.into_iter().flat_map(along).collect();
        }
        places.into_iter().map(|place| place as usize).collect()
    }

    pub(super) fn swapped(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    pub(super) fn permuted(&self, axes: &[usize]) -> Self {
        Self {
            shape: axes.iter().map(|axis| self.shape[*axis]).collect(),
            strides: axes.iter().map(|axis| self.strides[*axis]).collect(),
            start: self.start,
        }
    }

    pub(super) fn flipped(mut self, axes: &[usize]) -> Self {
        for axis in axes {
            let last = self.shape[*axis] as isize - 1;
            self.start += last.max(0) * self.strides[*axis];
            self.strides[*axis] = -self.strides[*axis];
        }
        self
    }

    pub(super) fn expanded(&self, shape: &[usize]) -> Result<Self, String> {
        let added = shape.len().checked_sub(self.shape.len());
        let fits = added.is_some_and(|added| {
            let pairs = self.shape.iter().zip(&shape[added..]);
            pairs.clone().all(|(own, to)| own == to || *own == 1)
        });
        if !fits {
            return Err(format!("{:?} does not broadcast to {shape:?}", self.shape));
        }
        let added = added.unwrap_or(0);
        let own = self.shape.iter().zip(&self.strides).zip(&shape[added..]);
        let own = own.map(|((own, stride), to)| if own == to { *stride } else { 0 });
        Ok(Self {
            shape: shape.to_vec(),
            strides: std::iter::repeat_n(0, added).chain(own).collect(),
            start: self.start,
        })
    }

    /// Returns the view of every `step`-th index in a range of a dim. A negative step starts from the end.
    pub(super) fn sliced(mut self, dim: usize, range: std::ops::Range<usize>, step: isize) -> Self {
        let len = range.len().div_ceil(step.unsigned_abs().max(1));
        let first = if step < 0 {
            range.end as isize - 1
        } else {
            range.start as isize
        };
        self.start += if len == 0 {
            0
        } else {
            first * self.strides[dim]
        };
        self.shape[dim] = len;
        self.strides[dim] *= step;
        self
    }

    /// Returns a view of windows along a dim, with the elements of each window along a new last dim.
    pub(super) fn unfolded(mut self, dim: usize, size: usize, step: usize) -> Self {
        let step = step.max(1);
        self.shape[dim] = (self.shape[dim] + step).saturating_sub(size) / step;
        self.shape.push(size);
        self.strides.push(self.strides[dim]);
        self.strides[dim] *= step as isize;
        self
    }
}
