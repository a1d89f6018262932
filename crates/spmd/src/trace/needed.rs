//! The recorded operations that a graph needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn::tensor::TensorData;
use burn_ir::{OperationIr, TensorId};

use super::narrow::check_narrow;
use crate::error::Error;
use crate::graph::{Node, Phase, operation_name};

/// Returns the operations that compute the `wanted` tensors from the `given` ones. Random draws of the loss stay even
/// if they are unused, because later draws depend on them.
///
/// # Errors
///
/// [`Error::RandomInModule`] if the operations depend on random numbers of the module's initialization, which would be
/// different in every step. [`Error::Uncapturable`] if an operation loses bits in a trace whose new tensors have the
/// parameters' compute type; `narrow` then holds the constants.
pub(super) fn needed(
    operations: Vec<OperationIr>,
    given: &BTreeMap<TensorId, TensorId>,
    mut wanted: BTreeSet<TensorId>,
    narrow: Option<&BTreeMap<TensorId, Arc<TensorData>>>,
) -> Result<Vec<OperationIr>, Error> {
    // All operations before the inputs belong to the module's initialization.
    let made = |op: &OperationIr| op.outputs().any(|output| given.contains_key(&output.id));
    let first = operations
        .iter()
        .rposition(made)
        .map_or(0, |index| index + 1);
    let mut kept = Vec::new();
    for (index, operation) in operations.into_iter().enumerate().rev() {
        if matches!(operation, OperationIr::Init(_) | OperationIr::Drop(_)) {
            continue;
        }
        let is_random = Node::new(operation.clone(), Phase::Forward).is_opaque();
        let is_needed = operation
            .outputs()
            .any(|output| wanted.contains(&output.id) && !given.contains_key(&output.id));
        if is_needed && is_random && index < first {
            let shape = operation.outputs().next().map(|out| out.shape.to_vec());
            return Err(Error::RandomInModule {
                operation: operation_name(&operation),
                shape: shape.unwrap_or_default(),
            });
        }
        if let (true, Some(constants)) = (is_needed, narrow) {
            check_narrow(&operation, index < first, constants)?;
        }
        if is_needed || is_random && index >= first {
            wanted.extend(operation.inputs().map(|input| input.id));
            kept.push(operation);
        }
    }
    kept.reverse();
    Ok(kept)
}
