//! The kernels on Burn's capture device, which records them.

use burn_capture::{CaptureBackend, CaptureClient};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorIr};
use burn_router::{RouterClient, RouterTensor};

use crate::backend::{Kernels, TensorKind};
use crate::table::FusedOperation;

type Recorded = RouterTensor<CaptureClient>;

/// Records the operations instead of computing them.
impl Kernels for CaptureBackend {
    fn run_kernel(
        kernel: FusedOperation,
        (floats, ints): (Vec<Recorded>, Vec<Recorded>),
        scalars: Vec<ScalarIr>,
        results: &[TensorKind],
    ) -> Vec<Recorded> {
        let client = floats[0].client.clone();
        let inputs = floats.into_iter().chain(ints).map(RouterTensor::into_ir);
        let inputs: Vec<TensorIr> = inputs.collect();
        let output = |(shape, dtype): &TensorKind| {
            TensorIr::uninit(client.create_empty_handle(), shape.clone(), *dtype)
        };
        let outputs: Vec<TensorIr> = results.iter().map(output).collect();
        let call = CustomOpIr::with_scalars(kernel.name(), &inputs, &outputs, scalars);
        client.register(OperationIr::Custom(call))
    }
}
