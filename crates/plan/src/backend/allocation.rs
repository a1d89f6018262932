//! The operands of an operation, and the memory of its result.

use super::strides::Strides;

/// An operand of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) strides: Strides,
    /// True if no other tensor uses its memory, so the operation may overwrite it.
    pub(crate) is_unique: bool,
    /// Number of elements of its memory.
    pub(crate) memory_elements: usize,
}

/// The memory of a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// The memory of the input with this index, whose elements are unchanged.
    View(usize, Strides),
    /// The memory of the input with this index, which is overwritten.
    Over(usize, Strides),
    /// New memory with this many elements.
    New(Strides, usize),
}

impl Allocation {
    pub(crate) fn fresh(shape: &[usize]) -> Self {
        let strides = Strides::contiguous(shape);
        let num_elements = strides.num_elements();
        Self::New(strides, num_elements)
    }
}
