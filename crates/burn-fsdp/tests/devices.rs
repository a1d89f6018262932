//! Compiled steps on a device, compared with Burn's own loop on the CPU.
#![cfg(feature = "wgpu")]

use burn::backend::{Cube, DispatchDevice};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, DeviceKind, Int, Tensor, TensorData};
use burn_fsdp::compile::Mode;
use burn_fsdp::internals::compile::compile_on;
use burn_fsdp::{Error, LaunchConfig, ProcessGroup, Strategy, launch};
use burn_fsdp_models::{Gpt, GptConfig};

const CONFIG: GptConfig = GptConfig {
    vocab: 19,
    seq: 8,
    layers: 2,
    heads: 2,
    dim: 6,
};

const STEPS: usize = 4;

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A large epsilon: with a small one Adam hides a wrong gradient scale.
fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-2)
}

/// The rows of a rank, which differ.
fn batch(step: usize, rank: usize, device: &Device) -> Tokens {
    let tokens = |shift: usize| {
        let token = |i: usize| ((i * 7 + rank * 5 + step * 3 + shift) % 19) as i64;
        let values: Vec<i64> = (0..16).map(token).collect();
        Tensor::from_data(TensorData::new(values, [2, 8]), device)
    };
    (tokens(0), tokens(1))
}

/// Burn's own loop, on the joined batch.
fn plainly(ranks: usize) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model: Gpt = CONFIG.init(&device, 4).expect("valid");
    let mut optimizer = adamw().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let parts = (0..ranks).map(|rank| {
            let (tokens, targets) = batch(step, rank, &device);
            model.loss(tokens, targets)
        });
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let loss = sum.div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    losses
}

fn compiled(world: &ProcessGroup, strategy: Strategy) -> Result<Vec<f64>, Error> {
    let device = Device::wgpu(DeviceKind::DefaultDevice);
    let DispatchDevice::Cube(on) = device.as_dispatch().clone() else {
        panic!("a device of CubeCL");
    };
    let mut step = compile_on::<Cube, Gpt, Tokens, _, _, _>(
        |device: &Device| CONFIG.init(device, 4).expect("valid"),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        adamw().build(),
        Mode::data_parallel(world.clone(), strategy).verified(),
        (),
        &device,
        on,
    )?;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        losses.push(step.step(1e-2, &batch(index, world.rank(), &device))?);
    }
    Ok(losses)
}

#[test]
fn compiled_steps_train_on_a_device() {
    for (ranks, strategy) in [
        (1, Strategy::NoShard),
        (2, Strategy::NoShard),
        (2, Strategy::FullShard),
    ] {
        let expected = plainly(ranks);
        let results = launch(LaunchConfig::new(ranks), move |world| {
            compiled(&world, strategy)
        });
        for losses in results.expect("it trains") {
            for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
                let expected = f64::from(*expected);
                assert!(
                    (loss - expected).abs() <= 1e-4 * expected.abs(),
                    "{ranks} {strategy:?}, step {step}: {loss} is not {expected}"
                );
            }
        }
    }
}
