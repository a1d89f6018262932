//! Plans are proved equal to what was traced, and wrong ones are refused.

mod mutants;

use burn::optim::{AdamWConfig, Optimizer};
use burn::tensor::{Device, FloatDType};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::{Clip, Norm};
use burn_fsdp_spmd::graph::Graph;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Certificate, Error, Mode, Precision, Strategy, certify};

use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, sequences, tokens};

/// Returns the models' steps as traced.
fn traced(optimizer: &impl Optimizer) -> Vec<(&'static str, Graph)> {
    let device = Device::flex();
    let config = TraceConfig::default;
    let gpt = trace(
        Gpt::new,
        Gpt::loss,
        optimizer,
        &tokens(0, 0, 2, &device),
        config(),
    );
    let cnn = trace(
        Cnn::new,
        Cnn::loss,
        optimizer,
        &images(0, &device),
        config(),
    );
    let recurrent = trace(
        Recurrent::new,
        Recurrent::loss,
        optimizer,
        &sequences(0, 5, &device),
        config(),
    );
    let encoder = trace(
        Encoder::new,
        Encoder::loss,
        optimizer,
        &sequences(0, 8, &device),
        config(),
    );
    vec![
        ("gpt", gpt.unwrap()),
        ("cnn", cnn.unwrap()),
        ("lstm", recurrent.unwrap()),
        ("encoder", encoder.unwrap()),
    ]
}

/// Returns settings of the passes, by names.
fn settings() -> Vec<(&'static str, Options)> {
    let default = Options::default;
    vec![
        ("none", Options::none()),
        ("default", default()),
        ("composed", default().kernels(false).fuse(false)),
        ("prefetch", default().prefetch(true)),
        ("kept", default().reshard_after_forward(false).bucket(None)),
        ("at end", default().optimizer(OptimizerPlace::AtEnd)),
        ("clip", default().clip_grad_norm(Clip::to(0.5))),
        (
            "clip largest",
            default()
                .clip_grad_norm(Clip::to(0.5).norm(Norm::Infinity))
                .prefetch(true),
        ),
        ("recompute", default().recompute_units(["**"])),
        (
            "bf16",
            default().precision(Precision::new(FloatDType::BF16).reduce(FloatDType::F32)),
        ),
    ]
}

fn proved(graph: &Graph, mode: Mode, options: &Options) -> Result<Certificate, Error> {
    certify(graph.clone(), &mode.options(options.clone()))
}

#[test]
fn right_plans_are_proved() {
    for (model, graph) in traced(&AdamWConfig::new().build()) {
        for (setting, options) in settings() {
            for strategy in [
                Strategy::FullShard,
                Strategy::ShardGradOp,
                Strategy::NoShard,
            ] {
                for ranks in 1..=4 {
                    let mode = Mode::data_parallel(ProcessGroup::fake(ranks, 0), strategy);
                    let proof = proved(&graph, mode, &options);
                    let proof = proof.unwrap_or_else(|error| {
                        panic!("{model}, {setting}, {strategy:?} on {ranks}: {error}")
                    });
                    assert_eq!(proof.num_ranks, ranks);
                    assert!(proof.num_tensors > 2 * graph.parameters().len());
                }
            }
        }
    }
}
