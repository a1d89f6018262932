//! What a graph is given anew at each step.

use burn_ir::BackendIr;

use super::step::CompiledStep;
use crate::graph::Graph;
use crate::trace::{Batch, data_of};

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Gives the executor the tensors of a batch, or micro-batch, and the factor of the loss where that is scaled.
    pub(super) fn feed<E: Batch>(&mut self, graph: &Graph, batch: &E) {
        let mut inputs = graph.inputs().iter();
        for ((_, data), id) in data_of(batch).into_iter().zip(&mut inputs) {
            self.executor.set(*id, data);
        }
        if let (Some(scaler), Some(id)) = (&self.done.scaler, inputs.next()) {
            self.executor.set(*id, scaler.factor());
        }
    }
}
