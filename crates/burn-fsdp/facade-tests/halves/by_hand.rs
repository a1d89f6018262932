//! Burn's layers with states, written out in the intended types.

use burn::module::RunningState;
use burn::nn::gru::Gru;
use burn::nn::{BatchNorm, BiLstm, GateController, Lstm};
use burn::tensor::activation::{sigmoid, tanh};
use burn::tensor::module::{batch_norm as evaluated, batch_norm_train};
use burn::tensor::{DType, Tensor};

/// Burn's BatchNorm, with an average in 32 bits.
pub(crate) fn batch_norm<const D: usize>(norm: &BatchNorm, x: Tensor<D>) -> Tensor<D> {
    if !x.device().is_autodiff() || !norm.training.is_enabled() {
        let like =
            |kept: &RunningState<Tensor<1>>| kept.value().to_device(&x.device()).cast(x.dtype());
        let (mean, variance) = (like(&norm.running_mean), like(&norm.running_var));
        let (gamma, beta) = (norm.gamma.val(), norm.beta.val());
        return evaluated(x, gamma, beta, mean, variance, norm.epsilon);
    }
    let of_batch = batch_norm_train(x, norm.gamma.val(), norm.beta.val(), norm.epsilon);
    let moved = |kept: Tensor<1>, new: Tensor<1>| {
        let new = new.detach().cast(DType::F32).mul_scalar(norm.momentum);
        (kept.mul_scalar(1.0 - norm.momentum) + new).detach()
    };
    let mean = moved(norm.running_mean.value_sync(), of_batch.mean);
    norm.running_mean.update(mean);
    let variance = moved(norm.running_var.value_sync(), of_batch.variance);
    norm.running_var.update(variance);
    of_batch.output
}

/// The time steps of a recurrent layer, and a state of zeros in the type of its input.
pub(crate) fn steps(x: Tensor<3>, width: usize) -> (Vec<Tensor<2>>, Tensor<2>) {
    let [rows, ..] = x.dims();
    let zeros = Tensor::zeros([rows, width], (&x.device(), x.dtype()));
    let steps = x.iter_dim(1).map(|x| x.squeeze_dim(1));
    (steps.collect(), zeros)
}

pub(crate) fn lstm(layer: &Lstm, x: Tensor<3>) -> Tensor<3> {
    let (steps, zeros) = steps(x, layer.d_hidden);
    let (mut cell, mut hidden) = (zeros.clone(), zeros);
    let outputs = steps.into_iter().map(|x| {
        let gate = |gate: &GateController| gate.gate_product(x.clone(), hidden.clone());
        let input = sigmoid(gate(&layer.input_gate));
        let forget = sigmoid(gate(layer.forget_gate.as_ref().expect("not coupled")));
        let output = sigmoid(gate(&layer.output_gate));
        let candidate = tanh(gate(&layer.cell_gate));
        cell = forget * cell.clone() + input * candidate;
        hidden = output * tanh(cell.clone());
        hidden.clone()
    });
    Tensor::stack(outputs.collect(), 1)
}

pub(crate) fn gru(layer: &Gru, x: Tensor<3>) -> Tensor<3> {
    let (steps, mut hidden) = steps(x, layer.d_hidden);
    let outputs = steps.into_iter().map(|x| {
        let input = |gate: &GateController| gate.input_transform.forward(x.clone());
        let state = |gate: &GateController| gate.hidden_transform.forward(hidden.clone());
        let update = sigmoid(input(&layer.update_gate) + state(&layer.update_gate));
        let reset = sigmoid(input(&layer.reset_gate) + state(&layer.reset_gate));
        let new = tanh(input(&layer.new_gate) + reset * state(&layer.new_gate));
        hidden = new * (-update.clone() + 1.0) + update * hidden.clone();
        hidden.clone()
    });
    Tensor::stack(outputs.collect(), 1)
}

pub(crate) fn bi_lstm(layer: &BiLstm, x: Tensor<3>) -> Tensor<3> {
    let back = lstm(&layer.reverse, x.clone().flip([1])).flip([1]);
    Tensor::cat(vec![lstm(&layer.forward, x), back], 2)
}
