//! Burn's base operations: the ones on views and data of tensors of any type.

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
