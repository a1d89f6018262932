//! Documents that share sequences, in compiled steps: the plain losses of each document alone are the oracle.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{
    Architecture, AttentionScores, GptConfig, LanguageModel, LlamaConfig, LlamaVariant,
    SlidingWindow,
};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{CompiledStep, Error, Mode, Strategy, compile};

use crate::compiled::seeded;
use crate::eager::{self, adamw};

/// Inputs with their positions, and targets with their weights.
type Tokens = (
    (Tensor<2, Int>, Option<Tensor<2, Int>>),
    (Tensor<2, Int>, Option<Tensor<2>>),
);

const STEPS: usize = 5;
const ROWS: usize = 6;
const SEQ: usize = 70;
const VOCAB: usize = 40;

const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 24,
    heads: 2,
    vocab: VOCAB,
    seq: SEQ,
};

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 24,
    heads: 6,
    kv_heads: 2,
    hidden: 20,
    vocab: VOCAB,
    seq: SEQ,
    rope_base: 100,
    variant: LlamaVariant::PLAIN,
};

/// Lengths of documents that fill a sequence.
const LENGTHS: [&[usize]; 5] = [
    &[70],
    &[2, 2, 60, 6],
    &[20, 50],
    &[64, 6],
    &[7, 2, 11, 30, 2, 18],
];

/// Returns some rows of a step's batch. Each step has other documents.
fn batch(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tokens {
    let shape = [rows.len(), SEQ];
    let at = |row: usize, column: usize| (step * ROWS + row) * SEQ + column;
    let all = || {
        rows.clone()
            .flat_map(|row| (0..SEQ).map(move |column| at(row, column)))
    };
    let ints = |values: Vec<i64>| Tensor::from_data(TensorData::new(values, shape), device);
    let token = |at: usize| ((at * at * 7 + at / 3) % VOCAB) as i64;
    let documents = rows
        .clone()
        .flat_map(|row| LENGTHS[(step + 2 * row) % LENGTHS.len()]);
    let positions = documents.flat_map(|len| 0..*len as i64).collect();
    let weights: Vec<f32> = all().map(|at| [0.5, 2.0, 0.0, 1.0][at % 4]).collect();
    let weights = Tensor::from_data(TensorData::new(weights, shape), device);
    (
        (ints(all().map(token).collect()), Some(ints(positions))),
        (ints(all().map(|at| token(at + 1)).collect()), Some(weights)),
    )
}

fn packed<M: LanguageModel>(model: &M, (inputs, targets): Tokens) -> Tensor<1> {
    recorded(|| model.mean_loss(inputs, targets))
}

/// The loss of a batch, with every document in a forward of its own.
fn alone<M: LanguageModel>(model: &M, batch: Tokens) -> Tensor<1> {
    let ((inputs, positions), (targets, weights)) = batch;
    let positions = positions.expect("packed").into_data();
    let positions: Vec<i64> = positions.iter::<i64>().collect();
    let len = positions.len();
    let flat = |tensor: Tensor<2, Int>| tensor.reshape([1, len]);
    let (inputs, targets) = (flat(inputs), flat(targets));
    let starts = (0..len).filter(|at| positions[*at] == 0);
    let ends = (1..=len).filter(|at| *at == len || positions[*at] == 0);
    let losses = starts.zip(ends).map(|(start, end)| {
        let own = |tensor: &Tensor<2, Int>| tensor.clone().narrow(1, start, end - start);
        let logits = model.logits_by(own(&inputs), |block, x, shared| {
            M::run_block(block, x, shared, None)
        });
        let targets = own(&targets).transpose();
        log_softmax(logits, 1).gather(1, targets).neg()
    });
    let losses = Tensor::cat(losses.collect(), 0);
    (losses * weights.expect("weighted").reshape([len, 1])).mean()
}

fn step<A: Architecture>(sizes: A, mode: Mode) -> Result<CompiledStep<Tokens>, Error> {
    let init = move |device: &Device| sizes.init(device, 1).expect("the sizes are valid");
    compile(init, packed::<A::Model>, adamw().build(), mode)
}

/// Compares compiled steps with plain training, and returns how often each operation of the last one's graph occurs.
fn assert_alone<A: Architecture>(name: &str, sizes: A, options: &Options) -> Vec<String> {
    let init = move |device: &Device| sizes.init(device, 1).expect("the sizes are valid");
    let whole = |step, device: &Device| batch(step, 0..ROWS, device);
    let rate = |_| 1e-2;
    let expected = eager::train(init, alone::<A::Model>, whole, STEPS, rate, adamw().init());
    let mut names = Vec::new();
    for num_ranks in [1, 2, 3] {
        let options = options.clone();
        let paths: Vec<String> = expected.parameters.keys().cloned().collect();
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            let mut step = step(sizes, mode.options(options.clone()).verified())?;
            let rows = ROWS / num_ranks;
            let first = world.rank() * rows;
            let losses = (0..STEPS).map(|index| {
                let batch = batch(index, first..first + rows, &Device::flex());
                step.step(1e-2, &batch)
            });
            let losses = losses.collect::<Result<Vec<_>, _>>()?;
            // The first step has no optimizer state. All others have one graph, whatever their documents are.
            assert_eq!(step.num_traces(), 2);
            let graph = step.graph().expect("a graph");
            let names: Vec<_> = graph.nodes().iter().map(|node| node.name()).collect();
            let parameters = paths.iter().map(|path| step.parameter(path));
            let parameters = parameters.collect::<Result<Vec<_>, _>>()?;
            Ok((losses, names, parameters))
        };
        let mut ranks = launch(LaunchConfig::new(num_ranks), body).expect("the ranks train");
        let (losses, of_graph, parameters) = ranks.swap_remove(0);
        for ((path, expected), found) in expected.parameters.iter().zip(parameters) {
            for (found, expected) in found.iter::<f32>().zip(expected.iter::<f32>()) {
                let is_close = (found - expected).abs() <= 1e-5;
                assert!(is_close, "{name}, {path}: {found} is not {expected}");
            }
        }
        for (index, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
            let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected);
            assert!(
                difference <= 1e-5,
                "{name} on {num_ranks} ranks, step {index}: {loss} is not {expected}"
            );
        }
        names = of_graph;
    }
    names
}

fn count(names: &[String], part: &str) -> usize {
    names.iter().filter(|name| name.contains(part)).count()
}

#[test]
fn documents_are_computed_alone_by_one_kernel_in_each_layer() {
    let _guard = seeded();
    let window = SlidingWindow::AllBut { size: 5, period: 2 };
    let windows = LlamaConfig {
        variant: LlamaVariant {
            scores: AttentionScores {
                window,
                ..LLAMA.variant.scores
            },
            ..LLAMA.variant
        },
        ..LLAMA
    };
    let options = Options::default();
    for names in [
        assert_alone("gpt", GPT, &options),
        assert_alone("llama", LLAMA, &options),
        assert_alone("windows", windows, &options),
    ] {
        assert_eq!(count(&names, "models.causal_attention"), 4, "{names:?}");
        // No mask is made.
        assert_eq!(
            count(&names, "Bool") + count(&names, "oftmax"),
            0,
            "{names:?}"
        );
    }
    let recomputed = Options::default().recompute_units(["layers.*"]);
    let names = assert_alone("recomputed", windows, &recomputed);
    assert_eq!(count(&names, "models.causal_attention"), 6, "{names:?}");
}

#[test]
fn soft_caps_share_the_masks_of_documents() {
    let _guard = seeded();
    let scores = AttentionScores {
        softcap: Some(5.0),
        window: SlidingWindow::AllBut { size: 5, period: 2 },
        ..LLAMA.variant.scores
    };
    let variant = LlamaVariant {
        scores,
        ..LLAMA.variant
    };
    let of = |layers| LlamaConfig {
        layers,
        variant,
        ..LLAMA
    };
    let options = Options::default();
    let masks = |names: &[String]| count(names, "Lower");
    let [two, four] = [2, 4].map(|layers| assert_alone("soft caps", of(layers), &options));
    // One for layers with a window, and one for those without. Backward makes them again instead of keeping them.
    assert_eq!(masks(&two), 4, "{two:?}");
    assert_eq!(masks(&four), 4, "{four:?}");
}
