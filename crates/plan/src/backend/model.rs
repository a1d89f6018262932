//! The interface for a backend's rules about each operation's memory.

use burn_ir::OperationIr;

use super::strides::Strides;

/// A backend's rules: the places of results, and the bytes that it allocates beside them.
pub(crate) trait Backend {
    /// Returns the place of the first result of an operation; further ones are new. `operands` are
    /// in the order in which the operation lists its inputs.
    fn place(&self, operation: &OperationIr, operands: &[Operand]) -> Allocation;

    /// Returns the bytes that an operation allocates and frees while it runs, beside its operands
    /// and results.
    fn scratch(&self, operation: &OperationIr, operands: &[Operand]) -> u64;

    /// Returns the place of the first result of an operation that is not Burn's and may write over
    /// the operand of that index; `None` if it cannot.
    fn written_over(&self, operand: &Operand, index: usize) -> Option<Allocation>;
}

/// An input as the operation finds it.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) strides: Strides,
    /// True if no other tensor is in its memory: the operation may write over it.
    pub(crate) is_unique: bool,
    /// Number of elements of its memory.
    pub(crate) memory_elements: usize,
}

/// The memory of a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// The memory of that input, whose elements are unchanged.
    View(usize, Strides),
    /// The memory of that input, which is written over.
    Over(usize, Strides),
    /// New memory of that many elements.
    New(Strides, usize),
}

impl Allocation {
    pub(crate) fn fresh(shape: &[usize]) -> Self {
        let strides = Strides::contiguous(shape);
        let num_elements = strides.num_elements();
        Self::New(strides, num_elements)
    }
}
