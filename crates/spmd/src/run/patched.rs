//! Operations of the optimizer with the scalars of a step.

use burn_ir::OperationIr;

use crate::error::Error;
use crate::graph::Node;
use crate::trace::StepScalars;

/// Gives an operation of the optimizer the scalars of this step. It never runs with those that it was traced with: they
/// were another step's.
pub(super) fn patched(
    index: usize,
    node: &Node,
    operation: OperationIr,
    scalars: &StepScalars,
) -> Result<OperationIr, Error> {
    let path = node.path.as_deref().unwrap_or_default();
    let mut all = node.scalar_values();
    let mut patched = Node::new(operation, node.phase);
    let are_set = node.scalars.iter().all(|slot| {
        let values = scalars.get(path, slot.position);
        let places = all.get_mut(slot.first..slot.first + slot.len);
        let (Some(values), Some(places)) = (values, places) else {
            return false;
        };
        let fit = values.len() == places.len();
        places
            .iter_mut()
            .zip(values)
            .for_each(|(place, value)| *place = *value);
        fit
    });
    if !are_set || !patched.set_scalar_values(&all) {
        let reason =
            format!("the optimizer's step for parameter \"{path}\" has no such scalars for it");
        return Err(failed(index, node, reason));
    }
    Ok(patched.operation)
}

/// Returns the error of a node that did not run.
pub(super) fn failed(index: usize, node: &Node, reason: String) -> Error {
    Error::Execution {
        node: index,
        operation: node.name(),
        reason,
    }
}
