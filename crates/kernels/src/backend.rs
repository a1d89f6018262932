//! The calls of kernels by models, and what a backend does with them.

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_ir::ScalarIr;

use crate::table::FusedOperation;

/// A call of a kernel by a model, without its operands.
#[derive(Clone, Debug)]
pub(crate) struct ModelCall {
    pub(crate) kernel: FusedOperation,
    /// The kernel of the gradients. It reads the kept floats, the gradient of the result, and the kept integers.
    pub(crate) gradient: FusedOperation,
    pub(crate) scalars: Vec<ScalarIr>,
    /// The results of the kernel. The last one is the result of the call.
    pub(crate) results: Vec<TensorKind>,
    pub(crate) keeps: Keeps,
}

/// The tensors that the gradients need.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keeps {
    /// The first floats, and all integers.
    Operands(usize),
    /// The first of two results.
    Result,
}

/// The shape and type of a tensor.
pub(crate) type TensorKind = (Shape, DType);

/// A backend that computes or records kernels.
pub(crate) trait Kernels: Backend {
    /// Runs a kernel on floats and the integers that follow them.
    fn run_kernel(
        kernel: FusedOperation,
        operands: (Vec<FloatTensor<Self>>, Vec<IntTensor<Self>>),
        scalars: Vec<ScalarIr>,
        results: &[TensorKind],
    ) -> Vec<FloatTensor<Self>>;
}
