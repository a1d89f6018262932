//! Units whose forward is recomputed in backward.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_spmd::graph::Phase;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Batch, Error, Mode, Precision, Strategy, compile};

use crate::compiled::seeded;
use crate::eager;
use crate::models::{Encoder, Gpt, TIME, sequences, tokens};

const STEPS: usize = 5;
const ROWS: usize = 12;

/// The results of training.
#[derive(Debug, PartialEq)]
struct Left {
    losses: Vec<f64>,
    parameters: BTreeMap<String, Vec<f32>>,
    peak: usize,
    /// Number of matrix products in backward.
    products: usize,
}

impl Left {
    fn same_as(&self, other: &Self) -> bool {
        self.losses == other.losses && self.parameters == other.parameters
    }
}

/// Trains on ranks that are seeded like the oracle.
fn train<M, B>(
    num_ranks: usize,
    options: &Options,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(usize, usize, usize, &Device) -> B,
) -> Result<Left, Error>
where
    M: Module + 'static,
    B: Batch,
{
    let options = options.clone();
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<Left, Error> {
        let device = Device::flex();
        let (rank, rows) = (world.rank(), ROWS / world.size());
        let mode = Mode::data_parallel(world, Strategy::FullShard).options(options.clone());
        let mut step = compile(init, loss, eager::adamw().build(), mode.verified())?;
        let mut losses = Vec::new();
        // Values are drawn when the first step is traced.
        for index in 0..STEPS {
            losses.push(step.step(1e-2, &batch(index, rank * rows, rows, &device))?);
        }
        let graph = step.graph().expect("it has run");
        let backward = graph.nodes().iter().filter(|n| n.phase == Phase::Backward);
        let products = backward
            .filter(|node| node.name() == "Custom.models.matmul" || node.name() == "Float.Matmul")
            .count();
        let paths: Vec<_> = step
            .parameters()
            .iter()
            .map(|s| s.path.to_string())
            .collect();
        let mut parameters = BTreeMap::new();
        for path in paths {
            let data = step.parameter(&path)?;
            parameters.insert(path, data.try_to_vec().expect("floats"));
        }
        Ok(Left {
            losses,
            parameters,
            peak: step.memory().peak_bytes(),
            products,
        })
    };
    let mut ranks = launch(LaunchConfig::new(num_ranks), body).map_err(|error| match error {
        burn_fsdp_collectives::LaunchError::Failed { source, .. } => {
            *source.downcast::<Error>().expect("an error of the step")
        }
        error => panic!("{error}"),
    })?;
    Ok(ranks.swap_remove(0))
}

#[test]
fn one_rank_matches_burn_bit_for_bit() {
    let _guard = seeded();
    let batch = |step: usize, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(
        Gpt::new,
        Gpt::loss,
        batch,
        STEPS,
        |_| 1e-2,
        eager::adamw().init(),
    );
    for units in [vec!["blocks.*"], vec!["blocks.0", "blocks.2"], vec!["**"]] {
        let options = Options::default()
            .kernels(false)
            .recompute_units(units.clone());
        let found = train(1, &options, Gpt::new, Gpt::loss, tokens).unwrap();
        for (path, expected) in &expected.parameters {
            let expected = expected.try_to_vec::<f32>().unwrap();
            assert_eq!(found.parameters[path], expected, "{units:?}, {path}");
        }
    }
}

#[test]
fn recomputing_is_bit_identical_in_every_schedule_and_type() {
    let _guard = seeded();
    let bf16 = Precision::new(FloatDType::BF16);
    for options in [
        Options::default(),
        Options::default().kernels(false).recompute(None),
        Options::default().prefetch(true).bucket(None),
        Options::default().optimizer(OptimizerPlace::InNextForward),
        Options::default().reshard_after_forward(false),
        Options::default().precision(bf16),
    ] {
        for num_ranks in [1, 2, 3] {
            let run = |options: &Options| {
                // The model of this loss has no types of its own.
                train(num_ranks, options, Gpt::new, Gpt::loss, tokens)
            };
            let kept = match run(&options) {
                Ok(kept) => kept,
                Err(error) => panic!("{options:?}: {error}"),
            };
            let again = run(&options.clone().recompute_units(["blocks.*"])).unwrap();
            assert!(again.same_as(&kept), "{options:?} on {num_ranks}");
            assert!(again.products > kept.products, "{options:?} on {num_ranks}");
        }
    }
}

#[test]
fn dropout_is_drawn_once() {
    let _guard = seeded();
    let batch = |step: usize, _: usize, _: usize, device: &Device| sequences(step, 8, device);
    let options = Options::default();
    let kept = train(1, &options, Encoder::new, Encoder::loss, batch).unwrap();
    let options = options.recompute_units(["encoder.layers.*"]);
    let again = train(1, &options, Encoder::new, Encoder::loss, batch).unwrap();
    assert!(again.same_as(&kept));
    assert!(again.products > kept.products);
}

/// Returns many sequences, to make activations most of the memory.
fn many(step: usize, first: usize, rows: usize, device: &Device) -> crate::models::TokenBatch {
    tokens(step, first * 40, rows * 40, device)
}

#[test]
fn only_inputs_and_outputs_of_units_are_kept() {
    let _guard = seeded();
    let run = |options: Options| train(2, &options, Gpt::new, Gpt::loss, many).unwrap();
    let kept = run(Options::default());
    let again = run(Options::default().recompute_units(["blocks.*"]));
    // The last of three blocks also has its activations in backward; the other two do not.
    let of_block = (kept.peak - again.peak) / 2;
    let width = 40 * (ROWS / 2) * TIME * 12 * 4;
    // A block's kernels keep queries, keys and values, the mixed values, and the wide rows.
    assert!(
        of_block >= 6 * width,
        "{} and {}: {width}",
        kept.peak,
        again.peak
    );
    let one = run(Options::default().recompute_units(["blocks.0"]));
    assert!(again.peak < one.peak && one.peak < kept.peak);
}

#[test]
fn an_unmatched_pattern_is_named_in_the_error() {
    let _guard = seeded();
    let options = Options::default().recompute_units(["layers.*"]);
    let error = train(1, &options, Gpt::new, Gpt::loss, tokens)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("layers.*") && error.contains("blocks.0"),
        "{error}"
    );
}
