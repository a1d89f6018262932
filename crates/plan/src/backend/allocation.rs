//! The operands of an operation, and the memory of its result.

use super::strides::Strides;

/// An operand's memory, and whether the operation may overwrite it.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) strides: Strides,
    /// True if no other tensor uses its memory, so the operation may overwrite it.
    pub(crate) is_unique: bool,
    /// Number of elements in its memory.
    pub(crate) memory_elements: usize,
}

/// The source of a result's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// A view of the input with this index.
    View(usize, Strides),
    /// The memory of the input with this index, which the operation overwrites.
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
