//! Burn's base operations: views and data movement of tensors of any type.

use burn_ir::{BaseOperationIr, OperationIr};

/// Returns the base operation, regardless of the type of its tensors; `None` for any other operation.
pub(super) fn base(operation: &OperationIr) -> Option<&BaseOperationIr> {
    match operation {
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
            Some(base)
        }
        _ => None,
    }
}
