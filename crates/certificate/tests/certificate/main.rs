//! Plans are proved equal to what was traced, and wrong ones are rejected.

#[path = "../../../spmd/tests/spmd/models.rs"]
mod models;
mod mutants;

use burn::optim::{AdamWConfig, Optimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_fsdp_certificate::{Certificate, certify, certify_at, compile};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Clip, Mesh, Norm, Placement::Shard};
use burn_fsdp_models::{Llama, LlamaConfig, LlamaVariant};
use burn_fsdp_spmd::graph::Graph;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::trace::{OptimizerStep, TraceConfig, trace};
use burn_fsdp_spmd::{DataParallel, Error, Expand, Mode, Precision, ProofError, Strategy};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

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
    let ids = || Tensor::<2, Int>::zeros([2, 6], &device);
    let llama = trace(
        |device: &Device| LLAMA.init(device, 1).unwrap(),
        |model: &Llama, (tokens, targets): (Tensor<2, Int>, Tensor<2, Int>)| {
            model.loss(tokens, targets)
        },
        optimizer,
        &(ids(), ids()),
        config(),
    );
    vec![
        ("gpt", gpt.unwrap()),
        ("cnn", cnn.unwrap()),
        ("lstm", recurrent.unwrap()),
        ("encoder", encoder.unwrap()),
        ("llama", llama.unwrap()),
    ]
}

/// A configuration that ties the head to the embedding's table, with one key head for two query heads.
const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 12,
    heads: 2,
    kv_heads: 1,
    hidden: 20,
    vocab: 17,
    seq: 6,
    rope_base: 10_000,
    variant: LlamaVariant {
        has_tied_head: true,
        ..LlamaVariant::PLAIN
    },
};

/// Returns settings of the passes for a model, by names.
fn settings(model: &str) -> Vec<(&'static str, Options)> {
    let default = Options::default;
    let mut all = vec![
        ("none", Options::none()),
        ("default", default()),
        ("composed", default().kernels(false).fuse(false)),
        ("prefetch", default().prefetch(true)),
        ("kept", default().reshard_after_forward(false).bucket(None)),
        ("at end", default().optimizer(OptimizerPlace::AtEnd)),
        (
            "in next forward",
            default().optimizer(OptimizerPlace::InNextForward),
        ),
        (
            "in next forward, clipped",
            default()
                .optimizer(OptimizerPlace::InNextForward)
                .clip_grad_norm(Clip::to(0.5)),
        ),
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
    ];
    // The other models have larger tensors than logits.
    if ["gpt", "llama"].contains(&model) {
        all.push(("loss in halves", default().loss_chunks(2)));
        let options = default().kernels(false).clip_grad_norm(Clip::to(0.5));
        all.push(("loss in thirds, composed", options.loss_chunks(3)));
    }
    all
}

fn proved(graph: &Graph, mode: Mode, options: &Options) -> Result<Certificate, Error> {
    certify(graph.clone(), 1, &mode.options(options.clone()).verified())
}

#[test]
fn right_plans_are_proved() {
    for (model, graph) in traced(&AdamWConfig::new().build()) {
        for (setting, options) in settings(model) {
            for strategy in [
                Strategy::FullShard,
                Strategy::ShardGradOp,
                Strategy::NoShard,
            ] {
                let ranks = match setting {
                    "none" | "default" => 1..=4,
                    _ => 2..=3,
                };
                for ranks in ranks {
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

#[test]
fn hybrids_and_micro_batches_are_proved() {
    for (model, graph) in traced(&AdamWConfig::new().build()) {
        for (setting, options) in settings(model) {
            for axes in [
                [("replicate", 2), ("shard", 3)],
                [("shard", 2), ("replicate", 2)],
            ] {
                let ranks = axes.iter().map(|axis| axis.1).product();
                let mesh = Mesh::new(axes).unwrap();
                let mesh = ProcessMesh::new(&ProcessGroup::fake(ranks, 0), mesh).unwrap();
                let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard).unwrap();
                let proof = proved(&graph, mode, &options);
                proof.unwrap_or_else(|error| panic!("{model}, {setting}, {axes:?}: {error}"));
            }
            for strategy in [Strategy::FullShard, Strategy::NoShard] {
                let mode = Mode::data_parallel(ProcessGroup::fake(2, 0), strategy);
                let mode = mode.options(options.clone());
                let proof = certify(graph.clone(), 3, &mode);
                proof.unwrap_or_else(|error| panic!("{model}, {setting}, 3 batches: {error}"));
            }
        }
    }
}

/// Returns the models' steps without random draws.
fn traced_without_dropout() -> Vec<(&'static str, Graph)> {
    let optimizer = AdamWConfig::new().build();
    let device = Device::flex();
    let batch = images(0, &device);
    let config = TraceConfig::default;
    let cnn = trace(
        Cnn::without_dropout,
        Cnn::loss,
        &optimizer,
        &batch,
        config(),
    );
    let batch = sequences(0, 8, &device);
    let encoder = trace(
        Encoder::without_dropout,
        Encoder::loss,
        &optimizer,
        &batch,
        config(),
    );
    let mut all = traced(&optimizer);
    all.retain(|(model, _)| ["gpt", "lstm", "llama"].contains(model));
    all.extend([("cnn", cnn.unwrap()), ("encoder", encoder.unwrap())]);
    all
}

#[test]
fn placements_are_proved() {
    let all = traced_without_dropout();
    let by_columns = Expand::new()
        .parameter("**.fc.weight", "model", Shard(1))
        .parameter("**.fc.bias", "model", Shard(0))
        .parameter("**.out.weight", "model", Shard(0));
    for (model, graph) in all {
        let prove = |what: &str, mode: Mode| {
            for (setting, options) in [("default", Options::default()), ("none", Options::none())] {
                let proof = proved(&graph, mode.clone(), &options);
                proof.unwrap_or_else(|error| panic!("{model}, {what}, {setting}: {error}"));
            }
        };
        for ranks in [1, 2] {
            let world = ProcessGroup::fake(ranks, 0);
            prove(
                "automatic",
                Mode::data_parallel(world, DataParallel::Automatic),
            );
        }
        let mesh = Mesh::new([("data", 2), ("model", 2)]).unwrap();
        let mesh = ProcessMesh::new(&ProcessGroup::fake(4, 0), mesh).unwrap();
        let cut = Expand::new().input("**", "data", Shard(0));
        prove("rows", Mode::expand(mesh.clone(), cut));
        if model == "gpt" {
            let both = by_columns.clone().input("**", "data", Shard(0));
            prove("rows and columns", Mode::expand(mesh, both));
        }
    }
}

/// Random dims that do not divide evenly.
#[test]
fn placements_with_padding_are_proved() {
    let meshes: [&[(&str, usize)]; 3] = [
        &[("model", 3)],
        &[("data", 2), ("model", 3)],
        &[("model", 5), ("data", 1)],
    ];
    for (model, graph) in traced_without_dropout() {
        for (seed, axes) in (0..).zip(meshes.iter().cycle().take(18)) {
            let rng = &mut StdRng::seed_from_u64(seed);
            let mesh = Mesh::new(axes.iter().copied()).unwrap();
            let ranks = mesh.axis("model").unwrap().size;
            let world = ProcessGroup::fake(mesh.size(), 0);
            let mesh = ProcessMesh::new(&world, mesh).unwrap();
            let mut expand = Expand::new().input("**", "data", Shard(0));
            for parameter in graph.parameters().iter().filter(|of| !of.is_buffer) {
                let dims = parameter.shape.iter().enumerate();
                let dims: Vec<usize> = dims
                    .filter(|(_, size)| **size >= ranks)
                    .map(|(dim, _)| dim)
                    .collect();
                if let Some(dim) = dims.choose(rng) {
                    expand = expand.parameter(&parameter.path, "model", Shard(*dim));
                }
            }
            let mode = Mode::expand(mesh, expand);
            let proof = proved(&graph, mode, &Options::default());
            let proof =
                proof.unwrap_or_else(|error| panic!("{model} on {axes:?}, seed {seed}: {error}"));
            println!("{model} on {axes:?}: {proof}");
        }
    }
}

/// A joined batch has one set of random numbers, and each rank draws its part.
#[test]
fn random_numbers_of_a_joined_batch_are_each_ranks_part() {
    let optimizer = AdamWConfig::new().build();
    for (model, graph) in traced(&optimizer) {
        if !["cnn", "encoder"].contains(&model) {
            continue;
        }
        for ranks in [1, 2] {
            let world = ProcessGroup::fake(ranks, 0);
            let mode = Mode::data_parallel(world, DataParallel::Automatic);
            let proof = proved(&graph, mode, &Options::default());
            proof.unwrap_or_else(|error| panic!("{model} on {ranks}: {error}"));
        }
    }
}

/// Returns the proof of the plan for this number of rows, traced for the first step or for a later one.
fn proved_at(rows: usize, step: OptimizerStep) -> Certificate {
    let traced = |rows| {
        let config = TraceConfig {
            step,
            ..TraceConfig::default()
        };
        let batch = tokens(0, 0, rows, &Device::flex());
        trace(
            Gpt::new,
            Gpt::loss,
            &AdamWConfig::new().build(),
            &batch,
            config,
        )
        .unwrap()
    };
    certify_at(traced(rows), traced(16), 1, &Mode::single()).unwrap()
}

/// Each step runs a proved plan, or is rejected before it changes anything.
#[test]
fn steps_of_plans_that_were_not_proved_are_refused() {
    const ROWS: usize = 20;
    let [first, later] = [OptimizerStep::First, OptimizerStep::Next].map(|of| proved_at(ROWS, of));
    let step = |proved: &[&Certificate], rows: &[usize]| {
        let mode = Mode::single().proved(proved.iter().copied());
        let mut step = compile(Gpt::new, Gpt::loss, AdamWConfig::new().build(), mode).unwrap();
        let rows = rows.iter();
        let done: Vec<_> = rows
            .map(|rows| step.step(1e-3, &tokens(0, 0, *rows, &Device::flex())))
            .collect();
        (done, step.num_steps())
    };
    let is_refused =
        |of: &Result<f64, Error>| matches!(of, Err(Error::Proof(ProofError::Unproved { .. })));
    let (done, _) = step(&[&first, &later], &[ROWS, ROWS, ROWS]);
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    // The optimizer has states then.
    let (done, steps) = step(&[&first], &[ROWS, ROWS]);
    assert!(done[0].is_ok() && is_refused(&done[1]), "{done:?}");
    assert_eq!(steps, 1);
    // A plan for other rows is a different plan, and a step with the right rows continues.
    let (done, steps) = step(&[&first, &later], &[ROWS, ROWS - 1, ROWS]);
    assert!(
        done[0].is_ok() && is_refused(&done[1]) && done[2].is_ok(),
        "{done:?}"
    );
    assert_eq!(steps, 2);
}

/// Two traces that are not of one step have no plans to compare.
#[test]
fn traces_of_other_operations_are_refused() {
    let traced = |rows| {
        let batch = tokens(0, 0, rows, &Device::flex());
        let optimizer = AdamWConfig::new().build();
        trace(
            Gpt::new,
            Gpt::loss,
            &optimizer,
            &batch,
            TraceConfig::default(),
        )
        .unwrap()
    };
    // A single row broadcasts, so the gradient has no sum over rows.
    match certify_at(traced(20), traced(1), 1, &Mode::single()) {
        Err(Error::Proof(ProofError::Twin { pass: None, .. })) => {}
        other => panic!("{other:?}"),
    }
}

/// Prints how long the proofs take.
#[test]
fn plans_of_two_by_two_by_two_ranks_are_proved() {
    let axes = [("data", 2), ("model", 2), ("depth", 2)];
    let mesh = Mesh::new(axes).unwrap();
    let mesh = ProcessMesh::new(&ProcessGroup::fake(8, 0), mesh).unwrap();
    for (model, graph) in traced_without_dropout() {
        let mut expand = Expand::new().input("**", "data", Shard(0));
        for (number, parameter) in graph.parameters().iter().enumerate() {
            let mut dims = parameter.shape.iter();
            let cut = dims.position(|size| size.is_multiple_of(2));
            let axis = ["model", "depth"][number % 2];
            if let Some(dim) = cut.filter(|_| !parameter.is_buffer) {
                expand = expand.parameter(&parameter.path, axis, Shard(dim));
            }
        }
        let options = Options::default();
        let modes = [
            ("placed", Mode::expand(mesh.clone(), expand)),
            (
                "sharded",
                Mode::data_parallel(ProcessGroup::fake(8, 0), Strategy::FullShard),
            ),
        ];
        for (division, mode) in modes {
            let proof = proved(&graph, mode, &options);
            let proof = proof.unwrap_or_else(|error| panic!("{model}, {division}: {error}"));
            println!("{model}, {division}: {proof}");
        }
    }
}
