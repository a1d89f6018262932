//! The tensors and numbers that each step receives.

use burn_fsdp_collectives::Fingerprint;
use burn_fsdp_mesh::LossScalerState;
use burn_fsdp_tensors::host_handle;
use burn_ir::BackendIr;

use super::step::CompiledStep;
use crate::graph::Graph;
use crate::trace::{Batch, InputValue, values_of};

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Passes the tensors of a batch or micro-batch to the executor, and the loss scale if there is one.
    pub(super) fn feed<E: Batch>(&mut self, graph: &Graph, batch: &E) {
        self.feed_values(graph, values_of(batch, host_handle));
    }

    /// Passes the values of the tensors of a batch to the executor, and the loss scale if there is one.
    pub(super) fn feed_values(&mut self, graph: &Graph, values: Vec<InputValue<Be>>) {
        let mut inputs = graph.inputs().iter();
        for (value, id) in values.into_iter().zip(&mut inputs) {
            match value {
                InputValue::Read(data) => self.executor.set(*id, data),
                InputValue::Lent {
                    tensor,
                    shape,
                    dtype,
                } => self.executor.lend(*id, tensor, (shape, dtype)),
            }
        }
        if let (Some(scaler), Some(id)) = (&self.done.scaler, inputs.next()) {
            self.executor.set(*id, scaler.factor());
        }
    }

    /// Returns a fingerprint of the loss scale, and of the step's number if it draws random numbers from a seed. It
    /// must be the same on all ranks.
    pub(super) fn given(&self) -> u64 {
        let draws_for = self.mode.is_seeded().then_some(self.done.steps);
        let scale = self.done.scaler.map(|scaler| {
            let LossScalerState {
                scale,
                growth_tracker,
            } = scaler.state;
            (
                scale.to_bits(),
                growth_tracker,
                format!("{:?}", scaler.scaling),
            )
        });
        Fingerprint::of(&(draws_for, scale))
    }
}
