//! Tensors of any numbers.

/// A tensor in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Array<N> {
    /// The shape.
    pub shape: Vec<usize>,
    /// The elements.
    pub elements: Vec<N>,
}

impl<N: Copy> Array<N> {
    /// Creates a tensor.
    pub fn new(shape: impl Into<Vec<usize>>, elements: Vec<N>) -> Self {
        let shape = shape.into();
        debug_assert_eq!(shape.iter().product::<usize>(), elements.len());
        Self { shape, elements }
    }

    /// Creates a tensor from a function of the flat index.
    pub fn from_fn(shape: &[usize], of: impl FnMut(usize) -> N) -> Self {
        let len = shape.iter().product();
        Self::new(shape, (0..len).map(of).collect())
    }

    /// Returns the tensor in another shape with the same number of elements.
    pub(crate) fn reshaped(self, shape: &[usize]) -> Result<Self, String> {
        if shape.iter().product::<usize>() == self.elements.len() {
            Ok(Self::new(shape, self.elements))
        } else {
            Err(format!("{:?} cannot have shape {shape:?}", self.shape))
        }
    }

    /// Returns the tensor with two dims swapped.
    pub(crate) fn swapped(&self, a: usize, b: usize) -> Self {
        let (mut shape, mut strides) = (self.shape.clone(), strides(&self.shape));
        shape.swap(a, b);
        strides.swap(a, b);
        let elements = places(&shape, &strides).into_iter();
        Self::new(shape, elements.map(|at| self.elements[at]).collect())
    }

    /// Returns the tensor expanded to `shape`: dims of one element are repeated, and missing dims are added in front.
    pub(crate) fn expanded(&self, shape: &[usize]) -> Result<Self, String> {
        if self.shape == shape {
            return Ok(self.clone());
        }
        let added = shape.len().checked_sub(self.shape.len());
        let fits = |added: &usize| {
            let mut pairs = self.shape.iter().zip(&shape[*added..]);
            pairs.all(|(own, to)| own == to || *own == 1)
        };
        let Some(added) = added.filter(fits) else {
            return Err(format!("{:?} does not broadcast to {shape:?}", self.shape));
        };
        let own = self.shape.iter().zip(strides(&self.shape));
        let own = own.zip(&shape[added..]);
        let own = own.map(|((own, stride), to)| if own == to { stride } else { 0 });
        let strides: Vec<usize> = std::iter::repeat_n(0, added).chain(own).collect();
        let elements = places(shape, &strides).into_iter();
        Ok(Self::new(
            shape,
            elements.map(|at| self.elements[at]).collect(),
        ))
    }

    /// Returns the rows along the last dim.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[N]> {
        let width = self.shape.last().copied().unwrap_or(1);
        self.elements.chunks_exact(width.max(1))
    }
}

/// Returns the row-major stride of each dim.
fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// Returns the flat indices of a strided view's elements, in row-major order.
fn places(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let dims = shape.iter().zip(strides);
    dims.fold(vec![0], |places, (len, stride)| {
        let along = |first: usize| (0..*len).map(move |index| first + index * stride);
        places.into_iter().flat_map(along).collect()
    })
}

/// Applies `of` to the operands' elements at each position, after broadcasting.
pub(crate) fn map<N: Copy + Default>(
    shape: &[usize],
    operands: &[&Array<N>],
    mut of: impl FnMut(&[N]) -> N,
) -> Result<Array<N>, String> {
    let operands = operands.iter().map(|operand| operand.expanded(shape));
    let operands = operands.collect::<Result<Vec<_>, _>>()?;
    let mut arguments = vec![N::default(); operands.len()];
    Ok(Array::from_fn(shape, |index| {
        for (argument, operand) in arguments.iter_mut().zip(&operands) {
            *argument = operand.elements[index];
        }
        of(&arguments)
    }))
}
