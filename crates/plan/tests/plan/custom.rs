//! Tests of custom operations: plans use their declarations.

use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::fused::{FusedOperation, recorded};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};
use burn_fsdp_plan::{Flops, MemoryPlan};
use burn_fsdp_spmd::{CustomOperations, Mode, compile, kernels};

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

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

fn adamw() -> AdamWConfig {
    AdamWConfig::new()
        .with_weight_decay(0.05)
        .with_epsilon(1e-2)
}

#[test]
fn declared_properties_of_operations_reach_the_passes_and_the_plan() {
    let graph_with = |operations: CustomOperations| {
        let step = compile(init, loss, adamw().build(), Mode::single()).unwrap();
        let mut step = step.operations(operations);
        let batch = batch(0, 0..ROWS, &Device::flex());
        step.compile_for(1e-2, &batch).unwrap()
    };
    let gelu = |is_pure, is_cheap| {
        let known = kernels();
        let kernel = |call: &_, tensors| FusedOperation::Gelu.run(call, tensors);
        known.kernel("models.gelu", kernel, move |_| {
            burn_fsdp_spmd::graph::CustomProfile {
                is_pure,
                is_cheap,
                flops: Flops {
                    convolution: 7,
                    ..Flops::default()
                },
                ..Default::default()
            }
        })
    };
    let count = |is_pure, is_cheap| {
        let graph = graph_with(gelu(is_pure, is_cheap));
        let calls = graph.nodes().iter();
        let calls = calls.filter(|node| node.name() == "Custom.models.gelu");
        let calls = calls.count();
        let flops = Flops::of_graph(&graph, 0).unwrap();
        assert_eq!(flops.convolution, 7 * calls as u64);
        calls
    };
    assert_eq!(count(true, true), 4);
    assert_eq!(count(true, false), 2);
    // An operation that is not pure is never repeated.
    assert_eq!(count(false, true), 2);
    // Declared in-place writes save memory.
    let reused = |operations| {
        let graph = graph_with(operations);
        MemoryPlan::new(&graph, 0).unwrap().reused_in_place
    };
    let elsewhere = kernels().kernel(
        "models.gelu_backward",
        |call, tensors| FusedOperation::GeluBackward.run(call, tensors),
        |_| Default::default(),
    );
    let bytes = (2 * ROWS * CONFIG.seq * 4 * CONFIG.dim * 4) as u64;
    assert!(reused(kernels()) >= reused(elsewhere) + bytes);
}
