//! The kernels on Burn's capture device, which records them.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_capture::{CaptureBackend, CaptureClient};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorIr};
use burn_router::{RouterClient, RouterTensor};

use crate::backend::Kernels;
use crate::documents::DocumentHeads;
use crate::table::FusedOperation;

type Recorded = RouterTensor<CaptureClient>;

/// Records the operations instead of computing them.
impl Kernels for CaptureBackend {
    fn gelu_kernel(x: Recorded) -> Recorded {
        let kind = kind(&x);
        let [y] = record(FusedOperation::Gelu, [x], [kind], []);
        y
    }

    fn gelu_gradient(x: Recorded, grad: Recorded) -> Recorded {
        let kind = kind(&x);
        let [grad] = record(FusedOperation::GeluBackward, [x, grad], [kind], []);
        grad
    }

    fn layer_norm_kernel(x: Recorded, gamma: Recorded, beta: Recorded, epsilon: f32) -> Recorded {
        let kind = kind(&x);
        let inputs = [x, gamma, beta];
        let [y] = record(FusedOperation::LayerNorm, inputs, [kind], [float(epsilon)]);
        y
    }

    fn layer_norm_gradients(
        x: Recorded,
        gamma: Recorded,
        grad: Recorded,
        epsilon: f32,
    ) -> [Recorded; 3] {
        let kinds = [kind(&x), kind(&gamma), kind(&gamma)];
        let inputs = [x, gamma, grad];
        record(
            FusedOperation::LayerNormBackward,
            inputs,
            kinds,
            [float(epsilon)],
        )
    }

    fn causal_attention_kernel(qkv: Recorded, batch: usize, heads: usize) -> Recorded {
        let [rows, width] = qkv.shape().dims();
        let kind = (Shape::new([rows, width / 3]), qkv.dtype());
        let scalars = [batch, heads].map(|size| ScalarIr::UInt(size as u64));
        let [y] = record(FusedOperation::CausalAttention, [qkv], [kind], scalars);
        y
    }

    fn causal_attention_gradient(
        qkv: Recorded,
        grad: Recorded,
        batch: usize,
        heads: usize,
    ) -> Recorded {
        let kind = kind(&qkv);
        let scalars = [batch, heads].map(|size| ScalarIr::UInt(size as u64));
        let operation = FusedOperation::CausalAttentionBackward;
        let [grad] = record(operation, [qkv, grad], [kind], scalars);
        grad
    }

    fn document_attention_kernel(
        qkv: Recorded,
        positions: Recorded,
        form: DocumentHeads,
    ) -> Recorded {
        let [rows, width] = qkv.shape().dims();
        let kind = (Shape::new([rows, width / 3]), qkv.dtype());
        let scalars = document_scalars(&positions, form);
        let inputs = [qkv, positions];
        let [y] = record(FusedOperation::CausalAttention, inputs, [kind], scalars);
        y
    }

    fn document_attention_gradient(
        qkv: Recorded,
        grad: Recorded,
        positions: Recorded,
        form: DocumentHeads,
    ) -> Recorded {
        let kind = kind(&qkv);
        let scalars = document_scalars(&positions, form);
        let operation = FusedOperation::CausalAttentionBackward;
        let [grad] = record(operation, [qkv, grad, positions], [kind], scalars);
        grad
    }

    fn cross_entropy_kernel(logits: Recorded, targets: Recorded) -> [Recorded; 2] {
        // The loss has 32 bits, regardless of the type of the logits.
        let kinds = [kind(&logits), (Shape::new([1]), DType::F32)];
        record(FusedOperation::CrossEntropy, [logits, targets], kinds, [])
    }

    fn cross_entropy_gradient(logits_gradient: Recorded, grad: Recorded) -> Recorded {
        let kind = kind(&logits_gradient);
        let inputs = [logits_gradient, grad];
        let [grad] = record(FusedOperation::CrossEntropyBackward, inputs, [kind], []);
        grad
    }
}

fn float(value: f32) -> ScalarIr {
    ScalarIr::Float(value.into())
}

/// Returns the batch size, the heads, and the reach of queries, or 0 if it is not limited.
fn document_scalars(positions: &Recorded, form: DocumentHeads) -> [ScalarIr; 3] {
    let [batch, _] = positions.shape().dims();
    let sizes = [batch, form.heads, form.reach.unwrap_or(0)];
    sizes.map(|size| ScalarIr::UInt(size as u64))
}

/// The shape and type of a tensor.
type TensorKind = (Shape, DType);

fn kind(tensor: &Recorded) -> TensorKind {
    (tensor.shape(), tensor.dtype())
}

fn record<const IN: usize, const OUT: usize, const SCALARS: usize>(
    operation: FusedOperation,
    inputs: [Recorded; IN],
    kinds: [TensorKind; OUT],
    scalars: [ScalarIr; SCALARS],
) -> [Recorded; OUT] {
    let client = inputs[0].client.clone();
    let inputs = inputs.map(RouterTensor::into_ir);
    let outputs =
        kinds.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let call = CustomOpIr::with_scalars(operation.name(), &inputs, &outputs, scalars.to_vec());
    let recorded = client.register(OperationIr::Custom(call));
    recorded
        .try_into()
        .expect("as many tensors come back as outputs were declared")
}
