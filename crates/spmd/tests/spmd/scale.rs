//! Tracing does not depend on the size of the tensors.

use std::time::Instant;

use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Gpt, GptConfig};
use burn_fsdp_spmd::Strategy;
use burn_fsdp_spmd::graph::{CollectiveKind, Stage};
use burn_fsdp_spmd::passes::schedule::{self, Options};
use burn_fsdp_spmd::trace::{TraceConfig, trace};

#[test]
fn thirteen_billion_parameters_are_traced_and_scheduled_without_their_memory() {
    let config = GptConfig {
        layers: 40,
        dim: 5120,
        heads: 40,
        vocab: 50257,
        seq: 2048,
    };
    let start = Instant::now();
    let tokens = Tensor::<2, Int>::zeros([1, 2048], &Device::flex());
    let graph = trace(
        |device: &Device| config.init(device, 1).unwrap(),
        |model: &Gpt, (tokens, targets): (Tensor<2, Int>, Tensor<2, Int>)| {
            model.loss(tokens, targets)
        },
        &AdamWConfig::new().build(),
        &(tokens.clone(), tokens),
        TraceConfig::default(),
    )
    .unwrap();
    let traced = start.elapsed();
    let num_parameters: usize = graph.parameters().iter().map(|p| p.num_elements()).sum();
    assert!(num_parameters > 12_800_000_000, "{num_parameters}");
    let pipeline = schedule::pipeline(64, Strategy::FullShard, &Options::default(), &[]);
    let graph = pipeline.run(graph).unwrap();
    println!(
        "{} nodes, traced in {traced:?}, scheduled in {:?}",
        graph.nodes().len(),
        start.elapsed() - traced
    );
    // Every block is gathered in forward and again in backward.
    let gathers = graph.nodes().iter().filter(|node| {
        let collective = node.collective.as_ref();
        collective.is_some_and(|collective| {
            collective.kind == CollectiveKind::AllGather && collective.stage != Stage::Wait
        })
    });
    let gathers = gathers.count();
    assert!(gathers >= 2 * config.layers, "{gathers}");
}
