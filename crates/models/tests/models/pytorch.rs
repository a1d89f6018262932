use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_fsdp_models::{Batches, GptConfig, TokenStream, WeightsFile};
use tempfile::TempDir;

use crate::safetensors::Container;

/// The sequence is longer than a block of the fused attention, and not a multiple of it.
const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    vocab: 31,
    seq: 80,
};

/// The losses that `torch_losses.py` prints with PyTorch 2.15.
const LOSSES: [f32; 6] = [
    3.9586816, 3.4344501, 3.3118014, 3.2332776, 3.2591636, 3.2786076,
];

#[test]
fn training_matches_the_losses_of_pytorch() {
    for device in [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ] {
        for (step, (found, expected)) in losses(&device).into_iter().zip(LOSSES).enumerate() {
            let relative = (found / expected - 1.0).abs();
            assert!(relative < 1e-5, "step {step}: {found}, PyTorch {expected}");
        }
    }
}

fn losses(device: &Device) -> Vec<f32> {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("weights.safetensors");
    Container::of_model(&CONFIG).write(&path);
    let mut model = WeightsFile::open(&path, CONFIG)
        .expect("the file fits the model")
        .load(device)
        .expect("the file is readable");
    let mut optimizer = AdamWConfig::new()
        .with_epsilon(0.01)
        .with_weight_decay(0.1)
        .init();
    let batches = Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: 2,
        seq: CONFIG.seq,
    };
    (0..LOSSES.len())
        .map(|step| {
            let (inputs, targets) = batches.rows(step, 0..2).to_tensors(device);
            let loss = model.loss(inputs, targets);
            let value = loss.clone().into_scalar();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.01, model.clone(), grads);
            value
        })
        .collect()
}
