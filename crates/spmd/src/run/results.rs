//! The results of collectives, among the executor's tensors.

use burn::tensor::TensorData;
use burn_ir::{BackendIr, HandleKind, TensorIr};

use super::collective::Delivered;
use super::executor::Executor;
use crate::graph::Collective;

impl<B: BackendIr> Executor<B> {
    /// Sets the value that a collective has delivered for its part `part`.
    pub(super) fn set_result(
        &mut self,
        output: &TensorIr,
        (collective, part): (&Collective, usize),
        result: Delivered<B>,
    ) {
        match result {
            Delivered::Host(data, seal) => {
                let data = self.seal_result(output.id, (collective, part), (data, seal));
                let (bytes, ..) = data.into_parts();
                self.flights.staging.arrives_on::<B>(bytes.len());
                let data = TensorData::from_bytes(bytes, output.shape.clone(), output.dtype);
                self.interpreter.register_tensor_data_id(output.id, data);
            }
            Delivered::Device(tensor) => {
                let tensor = B::float_reshape(tensor, output.shape.clone());
                let tensor = HandleKind::Float(tensor);
                self.interpreter
                    .register_tensor_to_device(output.id, tensor);
            }
        }
    }
}
