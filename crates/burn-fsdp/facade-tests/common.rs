//! A small GPT, its optimizer, and its training by plain Burn.

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Gpt, GptConfig};

pub(crate) const CONFIG: GptConfig = GptConfig {
    vocab: 19,
    seq: 8,
    layers: 2,
    heads: 2,
    dim: 6,
};

pub(crate) fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-3).init()
}

/// The device of sharded models.
pub(crate) fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

/// The same on every rank, so the mean over the ranks does not depend on their number.
pub(crate) fn loss(model: &Gpt, step: u64, device: &Device) -> Tensor<1> {
    let tokens = |start: u64| {
        let start = start as i64;
        let tokens = Tensor::<1, Int>::arange(start..start + 16, device);
        tokens.remainder_scalar(19).reshape([2, 8])
    };
    model.loss(tokens(step), tokens(step + 1))
}

/// The plain model after this many steps, and the loss of each.
pub(crate) fn trained_plainly(steps: u64) -> (Gpt, Vec<f32>) {
    let device = Device::flex().autodiff();
    let mut model = CONFIG.init(&device, 4).expect("valid sizes");
    let mut optimizer = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = loss(&model, step, &device);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    (model, losses)
}
