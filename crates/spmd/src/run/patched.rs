//! Operations of the optimizer with the scalars of a step.

use burn_ir::{BackendIr, OperationIr};

use super::executor::Executor;
use super::failed::failed;
use crate::error::Error;
use crate::graph::Node;
use crate::trace::StepScalars;

impl<B: BackendIr> Executor<B> {
    /// Sets the previous step's scalars, for nodes that were [moved](crate::passes::IterationGraph) from it into this
    /// step. With `None`, these nodes use the scalars of the run.
    pub fn moved_scalars(&mut self, before: Option<StepScalars>) {
        self.before = before;
    }

    /// Returns an optimizer operation with the scalars of its step in place of the traced ones.
    pub(super) fn patched(
        &self,
        index: usize,
        node: &Node,
        operation: OperationIr,
        scalars: &StepScalars,
    ) -> Result<OperationIr, Error> {
        let path = node.path.as_deref().unwrap_or_default();
        let mut all = node.scalar_values();
        let mut patched = Node::new(operation, node.phase);
        let before = self.before.as_ref().unwrap_or(scalars);
        let are_set = node.scalars.iter().all(|slot| {
            let of_step = if slot.is_of_before { before } else { scalars };
            let values = of_step.get(path, slot.position);
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
            let reason = format!(
                "the optimizer's step for parameter \"{path}\" does not have those scalars"
            );
            return Err(failed(index, node, reason));
        }
        Ok(patched.operation)
    }
}
