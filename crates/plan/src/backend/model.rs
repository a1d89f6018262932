//! What a backend says of each operation.

use burn_ir::OperationIr;

use super::strides::Strides;

/// Where a backend puts results, and what it allocates beside them.
pub(crate) trait Backend {
    /// The place of the first result of an operation; further ones are new. `operands` are in the order in
    /// which the operation lists its inputs.
    fn place(&self, operation: &OperationIr, operands: &[Operand]) -> Place;

    /// Bytes that an operation allocates and frees while it runs, beside its operands and results.
    fn scratch(&self, operation: &OperationIr, operands: &[Operand]) -> u64;

    /// The place of the first result of an operation that is not Burn's and may write over the operand of that
    /// index; `None` if it cannot.
    fn written_over(&self, operand: &Operand, index: usize) -> Option<Place>;
}

/// An input as the operation finds it.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) strides: Strides,
    /// Nobody else holds its memory: the operation may write over it.
    pub(crate) is_unique: bool,
    /// Elements of the memory that it lies in.
    pub(crate) memory_elements: usize,
}

/// Where a result lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the memory of that input, unchanged.
    View(usize, Strides),
    /// Over that input.
    Over(usize, Strides),
    /// In memory of its own, of that many elements.
    New(Strides, usize),
}

impl Place {
    pub(crate) fn fresh(shape: &[usize]) -> Self {
        let strides = Strides::contiguous(shape);
        let num_elements = strides.num_elements();
        Self::New(strides, num_elements)
    }
}
