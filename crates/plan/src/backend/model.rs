//! The interface for a backend's rules about the memory of operations.

use burn_ir::OperationIr;

use super::strides::Strides;

/// A backend's rules: the memory of results, and the bytes that operations allocate in addition.
pub(crate) trait Backend {
    /// Returns the allocation of the first result of an operation. Further results are new. `operands` are in the order
    /// in which the operation lists its inputs.
    fn place(&self, operation: &OperationIr, operands: &[Operand]) -> Allocation;

    /// Returns the bytes that an operation allocates and frees while it runs, in addition to its operands and
    /// results.
    fn scratch(&self, operation: &OperationIr, operands: &[Operand]) -> u64;

    /// Returns the allocation of the first result of a custom operation that may overwrite the operand with this index.
    /// Returns `None` if it cannot.
    fn written_over(&self, operand: &Operand, index: usize) -> Option<Allocation>;
}

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
