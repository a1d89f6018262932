//! Burn's capture device records.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_capture::{CaptureBackend, CaptureClient};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorIr};
use burn_router::{RouterClient, RouterTensor};

use crate::backend::Kernels;
use crate::operation::FusedOperation;

type Recorded = RouterTensor<CaptureClient>;

/// Records instead of computing.
impl Kernels for CaptureBackend {
    fn gelu_kernel(x: Recorded) -> Recorded {
        let shape = x.shape();
        let [y] = record(FusedOperation::Gelu, [x], [shape], []);
        y
    }

    fn gelu_gradient(x: Recorded, grad: Recorded) -> Recorded {
        let shape = x.shape();
        let [grad] = record(FusedOperation::GeluBackward, [x, grad], [shape], []);
        grad
    }

    fn layer_norm_kernel(x: Recorded, gamma: Recorded, beta: Recorded, epsilon: f32) -> Recorded {
        let shape = x.shape();
        let inputs = [x, gamma, beta];
        let [y] = record(FusedOperation::LayerNorm, inputs, [shape], [float(epsilon)]);
        y
    }

    fn layer_norm_gradients(
        x: Recorded,
        gamma: Recorded,
        grad: Recorded,
        epsilon: f32,
    ) -> [Recorded; 3] {
        let shapes = [x.shape(), gamma.shape(), gamma.shape()];
        let inputs = [x, gamma, grad];
        record(
            FusedOperation::LayerNormBackward,
            inputs,
            shapes,
            [float(epsilon)],
        )
    }

    fn causal_attention_kernel(qkv: Recorded, batch: usize, heads: usize) -> Recorded {
        let [rows, width] = qkv.shape().dims();
        let shape = Shape::new([rows, width / 3]);
        let scalars = [batch, heads].map(|size| ScalarIr::UInt(size as u64));
        let [y] = record(FusedOperation::CausalAttention, [qkv], [shape], scalars);
        y
    }

    fn causal_attention_gradient(
        qkv: Recorded,
        grad: Recorded,
        batch: usize,
        heads: usize,
    ) -> Recorded {
        let shape = qkv.shape();
        let scalars = [batch, heads].map(|size| ScalarIr::UInt(size as u64));
        let operation = FusedOperation::CausalAttentionBackward;
        let [grad] = record(operation, [qkv, grad], [shape], scalars);
        grad
    }

    fn cross_entropy_kernel(logits: Recorded, targets: Recorded) -> [Recorded; 2] {
        let shapes = [logits.shape(), Shape::new([1])];
        record(FusedOperation::CrossEntropy, [logits, targets], shapes, [])
    }

    fn cross_entropy_gradient(logits_gradient: Recorded, grad: Recorded) -> Recorded {
        let shape = logits_gradient.shape();
        let inputs = [logits_gradient, grad];
        let [grad] = record(FusedOperation::CrossEntropyBackward, inputs, [shape], []);
        grad
    }
}

fn float(value: f32) -> ScalarIr {
    ScalarIr::Float(value.into())
}

fn record<const IN: usize, const OUT: usize, const SCALARS: usize>(
    operation: FusedOperation,
    inputs: [Recorded; IN],
    shapes: [Shape; OUT],
    scalars: [ScalarIr; SCALARS],
) -> [Recorded; OUT] {
    let client = inputs[0].client.clone();
    let inputs = inputs.map(RouterTensor::into_ir);
    let outputs =
        shapes.map(|shape| TensorIr::uninit(client.create_empty_handle(), shape, DType::F32));
    let call = CustomOpIr::with_scalars(operation.name(), &inputs, &outputs, scalars.to_vec());
    let recorded = client.register(OperationIr::Custom(call));
    recorded
        .try_into()
        .expect("as many tensors come back as outputs were declared")
}
