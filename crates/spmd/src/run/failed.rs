//! The error of a node that failed.

use crate::error::Error;
use crate::graph::Node;

/// Returns the error of a node that failed.
pub(super) fn failed(index: usize, node: &Node, reason: String) -> Error {
    Error::Execution {
        node: index,
        operation: node.name(),
        reason,
    }
}
