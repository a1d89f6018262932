//! The kernels on Burn's CPU backend, which computes them.

use burn::backend::Flex;
use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, ScalarIr, TensorId, TensorIr, TensorStatus};

use crate::backend::{Kernels, TensorKind};
use crate::table::FusedOperation;

impl Kernels for Flex {
    fn run_kernel(
        kernel: FusedOperation,
        (floats, ints): (Vec<FlexTensor>, Vec<FlexTensor>),
        scalars: Vec<ScalarIr>,
        results: &[TensorKind],
    ) -> Vec<FlexTensor> {
        let inputs: Vec<FlexTensor> = floats.into_iter().chain(ints).collect();
        let tensor = |(shape, dtype): TensorKind| TensorIr {
            id: TensorId::new(0),
            shape,
            status: TensorStatus::ReadOnly,
            dtype,
        };
        let kind = |input: &FlexTensor| (input.layout().shape().clone(), input.dtype());
        let call = CustomOpIr {
            id: kernel.name().to_owned(),
            inputs: inputs.iter().map(kind).map(tensor).collect(),
            outputs: results.iter().cloned().map(tensor).collect(),
            scalars,
        };
        kernel.run(&call, inputs)
    }
}
