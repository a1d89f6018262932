//! Convolutions and pooling on tensors `[batch, channels, ..]`. All other dims are whole.

use burn_ir::{ModuleOperationIr as Module, OperationIr, TensorIr};

use crate::place::signature::Signature;

pub(super) fn signature(operation: &OperationIr) -> Option<Signature> {
    let OperationIr::Module(op) = operation else {
        return None;
    };
    Some(match op {
        Module::Conv1d(op) => {
            let groups = op.options.groups;
            forward(&op.x, &op.weight, op.bias.as_ref(), &op.out, groups)
        }
        Module::Conv2d(op) => {
            let groups = op.options.groups;
            forward(&op.x, &op.weight, op.bias.as_ref(), &op.out, groups)
        }
        Module::Conv3d(op) => {
            let groups = op.options.groups;
            forward(&op.x, &op.weight, op.bias.as_ref(), &op.out, groups)
        }
        Module::Conv1dXBackward(op) => {
            let groups = op.options.groups;
            x_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv2dXBackward(op) => {
            let groups = op.options.groups;
            x_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv3dXBackward(op) => {
            let groups = op.options.groups;
            x_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv1dWeightBackward(op) => {
            let groups = op.options.groups;
            weight_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv2dWeightBackward(op) => {
            let groups = op.options.groups;
            weight_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv3dWeightBackward(op) => {
            let groups = op.options.groups;
            weight_backward(&op.x, &op.weight, &op.output_grad, &op.out, groups)
        }
        Module::Conv1dBiasBackward(op) => bias_backward(&op.x, &op.bias, &op.output_grad, &op.out),
        Module::Conv2dBiasBackward(op) => bias_backward(&op.x, &op.bias, &op.output_grad, &op.out),
        Module::Conv3dBiasBackward(op) => bias_backward(&op.x, &op.bias, &op.output_grad, &op.out),
        // Their weights are `[in, out, ..]`, so only the batch is sharded.
        Module::ConvTranspose1d(op) => transposed(&op.x, &op.weight, op.bias.as_ref(), &op.out),
        Module::ConvTranspose2d(op) => transposed(&op.x, &op.weight, op.bias.as_ref(), &op.out),
        Module::ConvTranspose3d(op) => transposed(&op.x, &op.weight, op.bias.as_ref(), &op.out),
        Module::AvgPool1d(_)
        | Module::AvgPool2d(_)
        | Module::AvgPool1dBackward(_)
        | Module::AvgPool2dBackward(_)
        | Module::AdaptiveAvgPool1d(_)
        | Module::AdaptiveAvgPool2d(_)
        | Module::AdaptiveAvgPool3d(_)
        | Module::AdaptiveAvgPool1dBackward(_)
        | Module::AdaptiveAvgPool2dBackward(_)
        | Module::AdaptiveAvgPool3dBackward(_)
        | Module::MaxPool1d(_)
        | Module::MaxPool1dWithIndices(_)
        | Module::MaxPool1dWithIndicesBackward(_)
        | Module::MaxPool2d(_)
        | Module::MaxPool2dWithIndices(_)
        | Module::MaxPool2dWithIndicesBackward(_)
        | Module::Interpolate(_)
        | Module::InterpolateBackward(_) => pooling(operation),
        _ => return None,
    })
}

/// Returns the signature `x[b, i, ..]`, `weight[o, i, ..]`, `out[b, o, ..]`. With a bias, `i` is whole, because
/// otherwise every rank would add the bias.
fn forward(
    x: &TensorIr,
    weight: &TensorIr,
    bias: Option<&TensorIr>,
    out: &TensorIr,
    groups: usize,
) -> Signature {
    let signature = Signature::new();
    match (groups, bias) {
        (1, None) => signature
            .input(x, "bi")
            .input(weight, "oi")
            .output(out, "bo")
            .sums('i'),
        (1, Some(bias)) => signature
            .input(x, "b.")
            .input(weight, "o.")
            .input(bias, "o")
            .output(out, "bo"),
        _ => transposed(x, weight, bias, out),
    }
}

fn transposed(
    x: &TensorIr,
    weight: &TensorIr,
    bias: Option<&TensorIr>,
    out: &TensorIr,
) -> Signature {
    let signature = Signature::new().input(x, "b").input(weight, "");
    let signature = match bias {
        Some(bias) => signature.input(bias, ""),
        None => signature,
    };
    signature.output(out, "b")
}

fn x_backward(
    x: &TensorIr,
    weight: &TensorIr,
    output_grad: &TensorIr,
    out: &TensorIr,
    groups: usize,
) -> Signature {
    let forward = forward(x, weight, None, output_grad, groups);
    forward.gradient(0, &[0, 1], output_grad, out)
}

fn weight_backward(
    x: &TensorIr,
    weight: &TensorIr,
    output_grad: &TensorIr,
    out: &TensorIr,
    groups: usize,
) -> Signature {
    let forward = forward(x, weight, None, output_grad, groups);
    forward.gradient(1, &[0, 1], output_grad, out)
}

/// Returns the signature of a bias gradient. It does not depend on weights, so the channels of grouped convolutions can
/// also be sharded.
fn bias_backward(
    x: &TensorIr,
    bias: &TensorIr,
    output_grad: &TensorIr,
    out: &TensorIr,
) -> Signature {
    let forward = Signature::new()
        .input(x, "b")
        .input(bias, "o")
        .output(output_grad, "bo");
    forward.gradient(1, &[0, 1], output_grad, out)
}

/// Returns a signature in which every tensor has a batch and a channel dim.
fn pooling(operation: &OperationIr) -> Signature {
    let inputs = operation.inputs();
    let signature = inputs.fold(Signature::new(), |s, tensor| s.input(tensor, "bc"));
    let outputs = operation.outputs();
    outputs.fold(signature, |s, tensor| s.output(tensor, "bc"))
}
