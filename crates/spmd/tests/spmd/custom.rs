//! Custom operations: recorded, run, known to the passes.

use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_models::fused::{FusedOperation, recorded};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};
use burn_fsdp_spmd::graph::Phase;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{CompiledStep, CustomOperations, Error, Mode, Strategy, compile, kernels};

use crate::compiled::seeded;
use crate::eager::{self, adamw};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

const STEPS: usize = 10;
const ROWS: usize = 6;
const CONFIG: GptConfig = GptConfig {
    layers: 2,
    dim: 24,
    heads: 2,
    vocab: 40,
    seq: 70,
};

fn init(device: &Device) -> Gpt {
    CONFIG.init(device, 1).expect("the sizes are valid")
}

fn loss(model: &Gpt, (tokens, targets): Tokens) -> Tensor<1> {
    recorded(|| model.loss(tokens, targets))
}

fn batch(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tokens {
    let (vocab, seq) = (CONFIG.vocab, CONFIG.seq);
    let stream = TokenStream::Synthetic { vocab };
    let batches = Batches {
        stream,
        batch: ROWS,
        seq,
    };
    batches.rows(step, rows).to_tensors(device)
}

fn step(mode: Mode) -> Result<CompiledStep<Tokens>, Error> {
    let step = compile(init, loss, adamw().build(), mode)?;
    Ok(step)
}

/// Counts the custom operations, by name and phase.
fn calls(step: &CompiledStep<Tokens>) -> BTreeMap<(String, Phase), usize> {
    let graph = step.graph().expect("a step was compiled");
    let mut calls = BTreeMap::new();
    for node in graph.nodes().iter().filter(|node| node.custom.is_some()) {
        *calls.entry((node.name(), node.phase)).or_default() += 1;
    }
    calls
}

#[test]
fn a_gpt_of_fused_operations_matches_burn_bit_for_bit() {
    let _guard = seeded();
    let whole = |step, device: &Device| batch(step, 0..ROWS, device);
    let expected = eager::train(init, loss, whole, STEPS, |_| 1e-2, adamw().init());
    let mut step = step(Mode::single().verified()).unwrap();
    let device = Device::flex();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(1e-2, &whole(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "loss of step {index}");
    }
    for (path, expected) in &expected.parameters {
        let got = step.parameter(path).unwrap();
        assert_eq!(got.as_bytes(), expected.as_bytes(), "{path}");
    }
    let calls = calls(&step);
    let count = |operation: FusedOperation, phase| {
        let key = (format!("Custom.{}", operation.name()), phase);
        calls.get(&key).copied().unwrap_or(0)
    };
    use FusedOperation as F;
    use Phase::{Backward, Forward};
    for (operation, phase, expected) in [
        (F::Gelu, Forward, 2),
        // It is cheap enough to be recomputed instead of kept.
        (F::Gelu, Backward, 2),
        (F::GeluBackward, Backward, 2),
        (F::LayerNorm, Forward, 5),
        (F::LayerNorm, Backward, 5),
        (F::LayerNormBackward, Backward, 5),
        (F::CausalAttention, Forward, 2),
        (F::CausalAttention, Backward, 0),
        (F::CausalAttentionBackward, Backward, 2),
        (F::CrossEntropy, Forward, 1),
        (F::CrossEntropyBackward, Backward, 1),
    ] {
        assert_eq!(
            count(operation, phase),
            expected,
            "{operation:?} in {phase}"
        );
    }
}

#[test]
fn ranks_train_a_gpt_of_fused_operations_like_one_on_the_joined_batch() {
    let _guard = seeded();
    let whole = |step, device: &Device| batch(step, 0..ROWS, device);
    let expected = eager::train(init, loss, whole, STEPS, |_| 1e-2, adamw().init());
    for style in [Strategy::NoShard, Strategy::FullShard] {
        for num_ranks in [2, 3] {
            let body = move |world: ProcessGroup| -> Result<_, Error> {
                let mode = Mode::data_parallel(world.clone(), style).verified();
                let mut step = step(mode)?;
                let rows = ROWS / num_ranks;
                let first = world.rank() * rows;
                let losses = (0..STEPS).map(|index| {
                    let batch = batch(index, first..first + rows, &Device::flex());
                    step.step(1e-2, &batch)
                });
                losses.collect::<Result<Vec<_>, _>>()
            };
            let losses = launch(LaunchConfig::new(num_ranks), body).unwrap();
            for (step, (loss, expected)) in losses[0].iter().zip(&expected.losses).enumerate() {
                let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected);
                assert!(
                    difference <= 1e-5,
                    "{style:?} on {num_ranks} ranks, step {step}: {loss} is not {expected}"
                );
            }
        }
    }
}

#[test]
fn unknown_operations_are_named() {
    let _guard = seeded();
    let batch = |step| batch(step, 0..ROWS, &Device::flex());
    let optimizer = adamw().build();
    let graph = trace(init, loss, &optimizer, &batch(0), TraceConfig::default()).unwrap();
    let message = CustomOperations::<Flex>::new()
        .describe(graph)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("models.layer_norm") && message.contains("operations"),
        "{message}"
    );
    // Without `recorded`, the model is composed of Burn's operations.
    let composed = |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets);
    let options = Options::default().kernels(false).fuse(false);
    let mode = Mode::single().options(options);
    let mut step = compile(init, composed, optimizer, mode).unwrap();
    step.step(1e-2, &batch(0)).unwrap();
    assert_eq!(calls(&step).len(), 0);
}

#[test]
fn failing_and_inconsistent_kernels_are_named() {
    let _guard = seeded();
    let broken = |run: fn() -> usize| {
        let operations = kernels().kernel(
            "models.gelu",
            move |_, tensors| tensors.into_iter().cycle().take(run()).collect(),
            |_| Default::default(),
        );
        let step = compile(init, loss, adamw().build(), Mode::single()).unwrap();
        let mut step = step.operations(operations);
        let batch = batch(0, 0..ROWS, &Device::flex());
        let message = step.step(1e-2, &batch).unwrap_err().to_string();
        assert!(message.contains("models.gelu"), "{message}");
        assert!(matches!(
            step.step(1e-2, &batch),
            Err(Error::Poisoned { .. })
        ));
        message
    };
    assert!(broken(|| 2).contains("2 tensors"));
    assert!(broken(|| panic!("out of order")).contains("out of order"));
}
