//! The rules of Burn's CPU backend, `burn-flex` 0.22.1, operation by operation. They must be checked for every
//! upgrade of Burn.

mod kernel;
mod scratch;

use burn_ir::OperationIr;

use super::model::{Allocation, Backend, Operand};

/// Burn's CPU backend with one thread per rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flex;

impl Backend for Flex {
    fn place(&self, operation: &OperationIr, operands: &[Operand]) -> Allocation {
        kernel::place(operation, operands)
    }

    fn scratch(&self, operation: &OperationIr, operands: &[Operand]) -> u64 {
        scratch::scratch(operation, operands)
    }

    fn written_over(&self, operand: &Operand, index: usize) -> Option<Allocation> {
        kernel::over_whole(operand, index)
    }
}
