//! Operations on views and data of any type, whichever that is.

use burn_ir::{BaseOperationIr, OperationIr};

/// The operation on views and data of any type.
pub(super) fn base(operation: &OperationIr) -> Option<&BaseOperationIr> {
    match operation {
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
            Some(base)
        }
        _ => None,
    }
}
