//! One rank: the results equal Burn's loop bit for bit.

use std::sync::{Mutex, MutexGuard};

use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Batch, CompiledStep, Mode, compile};

use crate::eager::{self, adamw};
use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, sequences, tokens};

/// Burn's random numbers are one stream per process, from which every initialised model draws. Every test that compiles
/// a step holds this lock, even if its own values do not matter, because other tests depend on theirs.
static SEED: Mutex<()> = Mutex::new(());

pub(crate) fn seeded() -> MutexGuard<'static, ()> {
    SEED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn same<M: Module + 'static, B: Batch>(
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(usize, &Device) -> B,
    steps: usize,
    rate: fn(usize) -> f64,
) -> CompiledStep<B> {
    let _guard = seeded();
    let expected = eager::train(init, loss, batch, steps, rate, adamw().init());
    let device = Device::flex();
    device.seed(1);
    let mode = Mode::single().options(Options::default().kernels(false));
    let mut step = compile(init, loss, adamw().build(), mode.verified()).unwrap();
    device.seed(2);
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(rate(index), &batch(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "loss of step {index}");
    }
    for (path, expected) in &expected.parameters {
        let got = step.parameter(path).unwrap();
        assert_eq!(got.as_bytes(), expected.as_bytes(), "{path}");
    }
    step
}

#[test]
fn a_gpt_matches_burn_bit_for_bit() {
    let step = same(
        Gpt::new,
        Gpt::loss,
        |step, device| tokens(step, 0, 4, device),
        10,
        |_| 1e-2,
    );
    // One graph for the step without optimizer states, and one for all others.
    assert_eq!(step.num_traces(), 2);
}

#[test]
fn a_cnn_with_batch_norm_and_dropout_matches_burn_bit_for_bit() {
    let step = same(Cnn::new, Cnn::loss, images, 10, |_| 1e-2);
    let graph = step.graph().unwrap();
    let buffers = graph
        .parameters()
        .iter()
        .filter(|parameter| parameter.is_buffer);
    let buffers: Vec<_> = buffers.map(|parameter| &*parameter.path).collect();
    assert_eq!(
        buffers,
        [
            "norm1.running_mean",
            "norm1.running_var",
            "norm2.running_mean",
            "norm2.running_var"
        ]
    );
}

#[test]
fn an_lstm_matches_burn_bit_for_bit() {
    let batch = |step, device: &Device| sequences(step, 5, device);
    same(Recurrent::new, Recurrent::loss, batch, 10, |_| 1e-2);
}

#[test]
fn an_attention_encoder_matches_burn_bit_for_bit() {
    let batch = |step, device: &Device| sequences(step, 8, device);
    same(Encoder::new, Encoder::loss, batch, 10, |_| 1e-2);
}

#[test]
fn scalars_follow_a_schedule_over_100_steps() {
    // The rate starts at zero. AdamW then omits its weight decay, which makes another graph.
    let rate = |step: usize| match step {
        0..10 => step as f64 * 1e-3,
        _ => 1e-2 * (1.0 - step as f64 / 100.0),
    };
    let batch = |step, device: &Device| sequences(step, 5, device);
    let step = same(Recurrent::new, Recurrent::loss, batch, 100, rate);
    assert_eq!(step.num_steps(), 100);
    assert_eq!(step.num_traces(), 2);
}

#[test]
fn optimizers_with_other_first_steps_work() {
    let _guard = seeded();
    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let batch = |step, device: &Device| sequences(step, 5, device);
    let expected = eager::train(
        Recurrent::new,
        Recurrent::loss,
        batch,
        5,
        |_| 1e-2,
        sgd().init(),
    );
    let device = Device::flex();
    device.seed(1);
    let mut step = compile(
        Recurrent::new,
        Recurrent::loss,
        sgd().build(),
        Mode::single(),
    )
    .unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(1e-2, &batch(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "loss of step {index}");
    }
    let states = step.states("head.weight").unwrap();
    assert_eq!(states.len(), 1);
}

#[test]
fn each_input_shape_has_its_own_graph_in_a_bounded_cache() {
    let _guard = seeded();
    let device = Device::flex();
    let mode = Mode::single().cache(2);
    let mut step = compile(Gpt::new, Gpt::loss, AdamWConfig::new().build(), mode).unwrap();
    let mut run = |rows: usize| {
        step.step(1e-3, &tokens(rows, 0, rows, &device)).unwrap();
        step.num_traces()
    };
    assert_eq!(run(2), 1);
    assert_eq!(run(2), 2);
    assert_eq!(run(3), 3);
    assert_eq!(run(2), 3);
    assert_eq!(run(4), 4);
    // The graph for 3 rows is the least recently used.
    assert_eq!(run(2), 4);
    assert_eq!(run(3), 5);
}
