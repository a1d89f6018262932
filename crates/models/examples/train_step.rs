//! Measures training steps of the model by itself, without ranks or shards: forward, backward and AdamW.
//!
//! ```text
//! cargo run --release -p burn-fsdp-models --example train_step -- 10
//! ```
//!
//! The argument is the number of steps. `RAYON_NUM_THREADS` limits the threads.

use std::time::{Duration, Instant};

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_fsdp_models::{Batches, GptConfig, TokenStream};

const CONFIG: GptConfig = GptConfig {
    layers: 6,
    dim: 384,
    heads: 6,
    vocab: 4096,
    seq: 256,
};
const BATCH: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let num_steps = match std::env::args().nth(1) {
        Some(argument) => argument.parse()?,
        None => 10,
    };
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mut model = CONFIG.init(&device, 1)?;
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).init();
    let batches = Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: BATCH,
        seq: CONFIG.seq,
    };
    for step in 0..num_steps {
        let (inputs, targets) = batches.rows(step, 0..BATCH).to_tensors(&device);
        let start = Instant::now();
        let loss = model.loss(inputs, targets);
        let value = loss.clone().into_scalar::<f32>();
        let forward = start.elapsed();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let backward = start.elapsed() - forward;
        model = optimizer.step(1e-3, model, gradients);
        let total = start.elapsed();
        println!(
            "step {step}: loss {value:.5}, {:.0} ms (forward {:.0}, backward {:.0}, optimizer {:.0})",
            millis(total),
            millis(forward),
            millis(backward),
            millis(total - forward - backward),
        );
    }
    Ok(())
}

fn millis(duration: Duration) -> f64 {
    1e3 * duration.as_secs_f64()
}
