//! Tests that the planned bytes equal the executor's, node by node.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{self as models, GptConfig};
use burn_fsdp_plan::MemoryPlan;
use burn_fsdp_spmd::passes::DeferOptimizer;
use burn_fsdp_spmd::passes::schedule::{self, OptimizerPlace, Options};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Batch, Error, Expand, Mode, Strategy, compile};

use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, sequences, tokens};

/// The values that both report: peak, node of the peak, bytes after each node.
#[derive(Debug, Clone, PartialEq)]
struct Report {
    peak: u64,
    node: Option<usize>,
    after: Vec<(usize, u64)>,
}

fn assert_plan_is_exact<M: Module + 'static, B: Batch>(
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(usize, &Device) -> B,
) {
    let mut split = Options::default();
    split.prefetch = Some(true);
    for (style, options) in [
        (Strategy::FullShard, Options::default()),
        (Strategy::FullShard, split),
        (Strategy::FullShard, Options::none()),
        (Strategy::NoShard, Options::default()),
    ] {
        for num_ranks in [1, 2, 4] {
            let name = format!("{style:?} on {num_ranks} ranks, {options:?}");
            let options = options.clone();
            let mode = move |world: &ProcessGroup| {
                Mode::data_parallel(world.clone(), style).options(options.clone())
            };
            compare(&name, init, loss, batch, num_ranks, mode);
        }
    }
}

/// Compares the planned and executed values, and returns the lines of the graph.
fn compare<M: Module + 'static, B: Batch>(
    name: &str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: impl Fn(usize, &Device) -> B + Send + Sync + 'static,
    num_ranks: usize,
    mode: impl Fn(&ProcessGroup) -> Mode + Send + Sync + 'static,
) -> Vec<String> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let step = compile(init, loss, AdamWConfig::new().build(), mode(&world))?;
        let mut step = step;
        for index in 0..4 {
            step.step(1e-3, &batch(index, &device))?;
        }
        let graph = step.compile_for(1e-3, &batch(0, &device))?;
        let plan = MemoryPlan::new(&graph, world.rank())?;
        step.reset_peak();
        let (_, timeline) = step.step_with_timeline(1e-3, &batch(4, &device))?;
        let executed = Report {
            peak: step.memory().peak_bytes() as u64,
            node: step.memory().peak_node(),
            after: timeline
                .spans()
                .iter()
                .map(|span| (span.node, span.live_bytes as u64))
                .collect(),
        };
        let planned = Report {
            peak: plan.peak_bytes(),
            node: plan.peak_node,
            after: plan.moments.iter().map(|m| (m.node, m.after)).collect(),
        };
        let lines: Vec<String> = graph.to_string().lines().map(str::to_owned).collect();
        Ok((planned, executed, lines))
    };
    let mut graph = Vec::new();
    for (planned, executed, lines) in launch(LaunchConfig::new(num_ranks), body).unwrap() {
        let pairs = planned.after.iter().zip(&executed.after);
        if let Some(((node, planned), (_, executed))) = pairs.clone().find(|(a, b)| a != b) {
            let first = lines
                .iter()
                .position(|line| line.contains(" = "))
                .unwrap_or(0);
            panic!(
                "{name}: {planned} bytes planned after node {node} and {executed} executed: {:#?}",
                &lines[first + node.saturating_sub(6)..=first + node]
            );
        }
        assert_eq!(planned, executed, "{name}");
        graph = lines;
    }
    graph
}

#[test]
fn the_plan_of_a_gpt_is_exact() {
    assert_plan_is_exact(Gpt::new, Gpt::loss, |step, device| {
        tokens(step, 0, 4, device)
    });
}

#[test]
fn the_plan_of_a_loss_in_parts_is_exact() {
    let batch = |step: usize, device: &Device| tokens(step, 0, 4, device);
    for num_ranks in [1, 2, 4] {
        for options in [Options::default(), Options::none()] {
            let name = format!("{options:?} in parts on {num_ranks} ranks");
            let options = options.loss_chunks(3);
            let mode = move |world: &ProcessGroup| {
                Mode::data_parallel(world.clone(), Strategy::FullShard).options(options.clone())
            };
            compare(&name, Gpt::new, Gpt::loss, batch, num_ranks, mode);
        }
    }
}

#[test]
fn the_plan_of_a_cnn_with_batch_norm_is_exact() {
    assert_plan_is_exact(Cnn::new, Cnn::loss, images);
}

#[test]
fn the_plan_of_an_lstm_is_exact() {
    assert_plan_is_exact(Recurrent::new, Recurrent::loss, |step, device| {
        sequences(step, 5, device)
    });
}

/// The caller still has the batch, so an operation that would overwrite it makes a copy.
#[test]
fn the_plan_of_operations_on_the_batch_is_exact() {
    let loss = |model: &Recurrent, x: Tensor<3>| model.loss(x.div_scalar(3.0).add_scalar(0.5));
    assert_plan_is_exact(Recurrent::new, loss, |step, device| {
        sequences(step, 5, device)
    });
    let loss =
        |model: &Encoder, x: Tensor<3>| model.loss(x.reshape([2, 2, -1, 8]).flatten(0, 1).exp());
    assert_plan_is_exact(Encoder::new, loss, |step, device| {
        sequences(step, 8, device)
    });
    // A view of more rows is copied.
    assert_plan_is_exact(Recurrent::new, loss_of_half, |step, device| {
        sequences(step, 5, device).narrow(0, 1, 2)
    });
}

fn loss_of_half(model: &Recurrent, x: Tensor<3>) -> Tensor<1> {
    model.loss(x.clone().tanh() + x.clone().exp() * x)
}

#[test]
fn the_plan_of_an_attention_encoder_is_exact() {
    assert_plan_is_exact(Encoder::new, Encoder::loss, |step, device| {
        sequences(step, 8, device)
    });
}

#[test]
fn the_plan_of_redistributions_is_exact() {
    const SHAPE: [usize; 2] = [24, 12];
    for num_ranks in [2, 3, 4] {
        let mode = |world: &ProcessGroup| {
            let line = Mesh::line("line", world.size()).unwrap();
            let mesh = ProcessMesh::new(world, line).unwrap();
            let expand = Expand::new().input("0", "line", Shard(0));
            Mode::expand(mesh, expand.input("1", "line", Shard(1)))
        };
        let batch = move |step: usize, device: &Device| {
            let [rows, columns] = SHAPE;
            let of = |shape: [usize; 2]| Tensor::<2>::full(shape, step as f32, device);
            (
                of([rows / num_ranks, columns]),
                of([rows, columns / num_ranks]),
            )
        };
        let graph = compare(
            &format!("rows and columns on {num_ranks} ranks"),
            |device| LinearConfig::new(SHAPE[1], 3).init(device),
            |model: &Linear, (rows, columns): (Tensor<2>, Tensor<2>)| {
                model.forward(rows + columns).square().mean()
            },
            batch,
            num_ranks,
            mode,
        );
        let crossings = graph.iter().filter(|line| line.contains("all_to_all("));
        assert_eq!(crossings.count(), 1, "{graph:#?}");
    }
}

#[test]
fn the_plan_of_a_gpt_of_fused_operations_is_exact() {
    const CONFIG: GptConfig = GptConfig {
        layers: 3,
        dim: 24,
        heads: 2,
        vocab: 40,
        seq: 8,
    };
    assert_plan_is_exact(
        |device| CONFIG.init(device, 1).expect("the sizes are valid"),
        |model: &models::Gpt, (inputs, targets): (Tensor<2, Int>, Tensor<2, Int>)| {
            recorded(|| model.loss(inputs, targets))
        },
        |_, device| {
            let batch = || Tensor::ones([4, CONFIG.seq], device);
            (batch(), batch())
        },
    );
}

/// The graphs of a training run with a deferred optimizer begin with the same parameters, states and gradients, and
/// each can be planned separately.
#[test]
fn a_deferred_optimizer_is_planned_separately() {
    let device = Device::flex();
    let optimizer = AdamWConfig::new().build();
    let batch = tokens(0, 0, 2, &device);
    let config = TraceConfig::default();
    let graph = trace(Gpt::new, Gpt::loss, &optimizer, &batch, config).unwrap();
    let options = Options::default().optimizer(OptimizerPlace::InNextForward);
    let pipeline = schedule::pipeline(2, Strategy::FullShard, &options, &[]);
    let last = schedule::last(&options);
    let iteration = DeferOptimizer
        .split(pipeline.run(graph).unwrap(), &last)
        .unwrap();
    let main = MemoryPlan::new(&iteration.main, 0).unwrap();
    let alone = MemoryPlan::new(&iteration.cleanup, 0).unwrap();
    for (main, alone) in [
        (main.at_rest.parameters, alone.at_rest.parameters),
        (main.at_rest.optimizer_state, alone.at_rest.optimizer_state),
        (main.at_rest.gradients, alone.at_rest.gradients),
    ] {
        assert_eq!(main, alone);
    }
    assert_eq!(alone.at_rest.gradients, alone.at_rest.parameters);
    // Each of its operations overwrites the value that its result replaces.
    assert_eq!(alone.peak_bytes(), alone.at_rest.total());
    assert_eq!(alone.peak.full_parameters, 0);
}
