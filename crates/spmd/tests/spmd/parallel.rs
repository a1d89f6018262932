//! Several ranks compared with one on the joined batch.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use burn::tensor::Device;
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, launch, launcher_ranks};
use burn_fsdp_spmd::graph::Graph;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{GraphTransform, PassId};
use burn_fsdp_spmd::{Batch, DataParallel, Error, Mode, Strategy, compile};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::launcher;
use crate::models::{Cnn, Encoder, Gpt, Recurrent, images, rows_of_sequences, tokens};

const STEPS: usize = 10;
const ROWS: usize = 12;

/// Losses, and trainable parameters by path.
type Trained = (Vec<f64>, Vec<(String, Vec<f32>)>);

/// Returns a GPT trained by that many ranks.
fn trained(num_ranks: usize, style: impl Into<DataParallel>, options: Options) -> Trained {
    let rows = ROWS / num_ranks;
    train(
        num_ranks,
        style,
        options,
        Gpt::new,
        Gpt::loss,
        move |step, rank, device| tokens(step, rank * rows, rows, device),
    )
}

/// Returns a model trained by ranks that each hold a part of the joined batch.
fn train<M, B>(
    num_ranks: usize,
    style: impl Into<DataParallel>,
    options: Options,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> burn::tensor::Tensor<1>,
    part: impl Fn(usize, usize, &Device) -> B + Send + Sync + Clone + 'static,
) -> Trained
where
    M: burn::module::Module + 'static,
    B: Batch,
{
    let style = style.into();
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| {
        train_as_one(&world, style, options.clone(), init, loss, part.clone())
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

/// Returns a model trained as one of the ranks of a group.
fn train_as_one<M, B>(
    world: &ProcessGroup,
    style: DataParallel,
    options: Options,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> burn::tensor::Tensor<1>,
    part: impl Fn(usize, usize, &Device) -> B,
) -> Result<Trained, Error>
where
    M: burn::module::Module + 'static,
    B: Batch,
{
    let device = Device::flex();
    let mode = Mode::data_parallel(world.clone(), style);
    let mode = mode.options(options).verified();
    let mut step = compile(init, loss, adamw().build(), mode)?;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        losses.push(step.step(1e-2, &part(index, world.rank(), &device))?);
    }
    let paths: Vec<_> = step
        .parameters()
        .iter()
        .map(|spec| spec.path.clone())
        .collect();
    let mut parameters = Vec::new();
    for path in paths {
        let data = step.parameter(&path)?;
        // Running statistics differ between ranks, and counters are not floats.
        if let Ok(values) = data.try_to_vec::<f32>()
            && !path.contains("running_")
        {
            parameters.push((path.to_string(), values));
        }
    }
    Ok((losses, parameters))
}

/// Compares to 1e-5 of each loss, and of the largest value of each parameter.
fn assert_close(what: &str, (losses, parameters): &Trained, expected: &eager::Trained) {
    assert_losses_close(what, losses, expected);
    assert!(!parameters.is_empty());
    for (path, values) in parameters {
        let expected = expected.parameters[path].try_to_vec::<f32>().unwrap();
        assert_eq!(values.len(), expected.len(), "{path}");
        let largest = expected
            .iter()
            .fold(1e-6f32, |most, value| most.max(value.abs()));
        for (value, expected) in values.iter().zip(&expected) {
            assert!(
                (value - expected).abs() <= 1e-5 * largest,
                "{what}, {path}: {value} is not {expected}, the largest is {largest}"
            );
        }
    }
}

fn assert_losses_close(what: &str, losses: &[f64], expected: &eager::Trained) {
    assert_eq!(losses.len(), expected.losses.len());
    for (step, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
        let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected).abs();
        assert!(
            difference <= 1e-5,
            "{what}, step {step}: {loss} is not {expected}"
        );
    }
}

#[test]
fn ranks_together_train_like_one_on_the_joined_batch() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    for style in [Strategy::NoShard, Strategy::FullShard] {
        for num_ranks in [1, 2, 3, 4] {
            let options = Options::default().kernels(num_ranks > 1);
            let got = trained(num_ranks, style, options);
            assert_close(&format!("{style:?} on {num_ranks} ranks"), &got, &expected);
            if num_ranks == 1 {
                let losses: Vec<_> = expected
                    .losses
                    .iter()
                    .map(|loss| f64::from(*loss))
                    .collect();
                assert_eq!(got.0, losses, "on one rank to the bit");
            }
        }
    }
}

#[test]
fn processes_together_train_like_one_on_the_joined_batch() {
    if launcher::scene().is_none() {
        for processes in [2, 4] {
            let test = "parallel::processes_together_train_like_one_on_the_joined_batch";
            launcher::again_as_processes(processes, test);
        }
        return;
    }
    let _guard = seeded();
    let size = launcher_ranks().expect("started among others");
    let body = move |world: ProcessGroup| -> Result<(), Error> {
        let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
        let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
        let rows = ROWS / world.size();
        let part = |step, rank, device: &Device| tokens(step, rank * rows, rows, device);
        for style in [
            Strategy::NoShard.into(),
            Strategy::FullShard.into(),
            DataParallel::Automatic,
        ] {
            Device::flex().seed(1);
            let options = Options::default();
            let got = train_as_one(&world, style, options, Gpt::new, Gpt::loss, part)?;
            assert_close(&format!("{style:?}"), &got, &expected);
        }
        Ok(())
    };
    launch(LaunchConfig::new(size), body).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn ranks_with_different_batch_shapes_get_an_error_and_continue() {
    let _guard = seeded();
    // The steps in which both ranks have the same number of rows.
    let whole = |step: usize, device: &Device| tokens([1, 2, 4, 5][step], 0, 4, device);
    let expected = eager::train(Gpt::new, Gpt::loss, whole, 4, |_| 1e-2, adamw().init());
    for style in [
        Strategy::NoShard.into(),
        Strategy::FullShard.into(),
        DataParallel::Automatic,
    ] {
        Device::flex().seed(1);
        let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
            let device = Device::flex();
            let mode = Mode::data_parallel(world.clone(), style).verified();
            let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
            let mut losses = Vec::new();
            for index in 0..6 {
                // In the first step both ranks must trace. In the fourth, rank 0 already has its graph.
                let rows = match index {
                    0 | 3 => 2 - world.rank(),
                    _ => 2,
                };
                match step.step(1e-2, &tokens(index, 2 * world.rank(), rows, &device)) {
                    Ok(loss) => losses.push(loss),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(
                            matches!(error, Error::GraphsDiffer { rank: 1, .. }),
                            "{text}"
                        );
                        let both = text.contains("[2, 6]") && text.contains("[1, 6]");
                        assert!(both && [0, 3].contains(&index), "step {index}: {text}");
                    }
                }
            }
            Ok(losses)
        };
        for losses in launch(LaunchConfig::new(2), body).unwrap() {
            assert_eq!(losses.len(), 4, "{style:?}");
            assert_losses_close(&format!("{style:?}"), &losses, &expected);
        }
    }
}

#[test]
fn ranks_with_different_learning_rates_get_an_error() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<String, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), Strategy::NoShard);
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let rate = [1e-2, 2e-2][world.rank()];
        let error = step.step(rate, &tokens(0, world.rank(), 1, &device));
        Ok(error.unwrap_err().to_string())
    };
    for text in launch(LaunchConfig::new(2), body).unwrap() {
        let both = text.contains("learning rate 0.01") && text.contains("learning rate 0.02");
        assert!(both, "{text}");
    }
}

#[test]
fn passes_do_not_change_a_bit() {
    let _guard = seeded();
    for style in [Strategy::NoShard, Strategy::FullShard] {
        let expected = trained(2, style, Options::none());
        // Kernels sum in a different order.
        let plain = Options::default().kernels(false);
        let mut prefetch = plain.clone();
        prefetch.prefetch = Some(true);
        let mut deferred = plain.clone();
        deferred.optimizer = OptimizerPlace::InNextForward;
        let mut both = prefetch.clone();
        both.optimizer = OptimizerPlace::InNextForward;
        for options in [plain, prefetch, deferred, both] {
            assert_eq!(trained(2, style, options), expected, "{style:?}");
        }
    }
}

/// Counts the collectives of the third step, by kind.
fn counts(num_ranks: usize, style: Strategy, options: Options) -> [u64; 3] {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), style);
        let mode = mode.options(options.clone()).verified();
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let batch = tokens(0, world.rank(), 1, &device);
        step.step(1e-2, &batch)?;
        step.step(1e-2, &batch)?;
        let before = world.counts();
        step.step(1e-2, &batch)?;
        let after = world.counts();
        let kinds = [
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::AllReduce,
        ];
        Ok(kinds.map(|kind| after.of(kind).operations - before.of(kind).operations))
    };
    let mut counts = launch(LaunchConfig::new(num_ranks), body).unwrap();
    assert!(counts.windows(2).all(|pair| pair[0] == pair[1]));
    counts.swap_remove(0)
}

#[test]
fn collective_counts_match_the_formula() {
    let _guard = seeded();
    const BLOCKS: u64 = 3;
    // wte, wpe, blocks, lnf, head.
    const UNITS: u64 = BLOCKS + 4;
    // Per block: two norms with two parameters each, four linears of attention and two others with two each. Then the
    // rest.
    const PARAMETERS: u64 = BLOCKS * (4 + 8 + 4) + 1 + 1 + 2 + 1;
    for num_ranks in [1, 2, 4] {
        let (shard, replicate) = (Strategy::FullShard, Strategy::NoShard);
        let defaults = Options::default();
        // Every unit is gathered once in forward, and the blocks again in backward. Backward does not read embeddings,
        // and the last two units are still there.
        assert_eq!(
            counts(num_ranks, shard, defaults.clone()),
            [UNITS + BLOCKS, UNITS, 1]
        );
        let mut kept = defaults.clone();
        kept.reshard_after_forward = false;
        assert_eq!(counts(num_ranks, shard, kept), [UNITS, UNITS, 1]);
        // All gradients and the loss fit into the first bucket of 1 MiB. A single rank already has their means.
        let with_peers = u64::from(num_ranks > 1);
        assert_eq!(counts(num_ranks, replicate, defaults), [0, 0, with_peers]);
        let none = Options::none();
        assert_eq!(
            counts(num_ranks, shard, none.clone()),
            [PARAMETERS, PARAMETERS, 1]
        );
        let each = with_peers * (PARAMETERS + 1);
        assert_eq!(counts(num_ranks, replicate, none), [0, 0, each]);
    }
}

#[test]
fn a_deferred_optimizer_runs_when_parameters_are_read() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let make = |optimizer| {
            let mut options = Options::default();
            options.optimizer = optimizer;
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            let mode = mode.options(options).verified();
            // Ranks draw in turns; rank 0's numbers count.
            if world.rank() == 0 {
                device.seed(1);
            }
            compile(Gpt::new, Gpt::loss, adamw().build(), mode)
        };
        let mut expected = make(OptimizerPlace::InBackward)?;
        let mut deferred = make(OptimizerPlace::InNextForward)?;
        let batch = |index| tokens(index, 2 * world.rank(), 2, &device);
        let mut main = None;
        for index in 0..6 {
            let rate = 1e-2 / (index + 1) as f64;
            let loss = expected.step(rate, &batch(index))?;
            // Neither reading in between nor ending changes anything.
            let got = match index {
                3 => deferred.last_step(rate, &batch(index))?,
                _ => deferred.step(rate, &batch(index))?,
            };
            assert_eq!(got, loss, "step {index}");
            if index >= 3 {
                let held = deferred.memory().live_bytes();
                deferred.flush()?;
                let was_pending = deferred.memory().live_bytes() < held;
                assert_eq!(was_pending, index != 3, "step {index}");
            }
            if index == 2 {
                main = deferred.graph().map(ToString::to_string);
            }
            if index != 1 {
                for path in ["wte.weight", "blocks.1.fc.weight", "head.weight"] {
                    assert_eq!(deferred.shard(path)?, expected.shard(path)?, "{path}");
                    let (a, b) = (deferred.state_shards(path)?, expected.state_shards(path)?);
                    assert_eq!(a, b, "{path}");
                }
            }
        }
        Ok(main)
    };
    let graphs = launch(LaunchConfig::new(2), body).unwrap();
    let graph = graphs[0].clone().unwrap();
    assert!(graph.contains("pending gradient head.weight"), "{graph}");
    // The optimizer's part for the first weights of forward comes before their gather.
    let line = |what: &str| graph.lines().position(|line| line.contains(what)).unwrap();
    assert!(line(" optimizer") < line("all_gather"), "{graph}");
    assert!(line("all_gather") < line(" backward"), "{graph}");
}

#[test]
fn recurrent_and_attention_models_train_like_one_rank() {
    let _guard = seeded();
    let whole =
        |width| move |step, device: &Device| rows_of_sequences(step, width, 0..ROWS, device);
    let rate = |_| 1e-2;
    let lstm = eager::train(
        Recurrent::new,
        Recurrent::loss,
        whole(5),
        STEPS,
        rate,
        adamw().init(),
    );
    let encoder = eager::train(
        Encoder::without_dropout,
        Encoder::loss,
        whole(8),
        STEPS,
        rate,
        adamw().init(),
    );
    for num_ranks in [2, 3, 4] {
        let part = move |width| {
            move |step: usize, rank: usize, device: &Device| {
                let rows = ROWS / num_ranks;
                rows_of_sequences(step, width, rank * rows..(rank + 1) * rows, device)
            }
        };
        for style in [
            Strategy::NoShard.into(),
            Strategy::FullShard.into(),
            DataParallel::Automatic,
        ] {
            let what = format!("{style:?} on {num_ranks} ranks");
            let options = Options::default;
            let (init, loss) = (Recurrent::new, Recurrent::loss);
            let got = train(num_ranks, style, options(), init, loss, part(5));
            assert_close(&what, &got, &lstm);
            let (init, loss) = (Encoder::without_dropout, Encoder::loss);
            let got = train(num_ranks, style, options(), init, loss, part(8));
            assert_close(&what, &got, &encoder);
        }
    }
}

#[test]
fn batch_norm_has_the_statistics_of_the_ranks_own_part() {
    let _guard = seeded();
    for num_ranks in [2, 3, 4] {
        let part = |step: usize, rank: usize, device: &Device| images(step * 7 + rank, device);
        let local = move |step: usize, device: &Device| {
            (0..num_ranks)
                .map(|rank| part(step, rank, device))
                .collect()
        };
        // One rank that runs every part separately, and averages losses and gradients.
        let loss = move |model: &Cnn, parts: Vec<_>| {
            let losses = parts.into_iter().map(|part| Cnn::loss(model, part));
            let sum = losses
                .reduce(|sum, loss| sum + loss)
                .expect("there are parts");
            sum / num_ranks as f64
        };
        let init = Cnn::without_dropout;
        let expected = eager::train(init, loss, local, STEPS, |_| 1e-2, adamw().init());
        for style in [Strategy::NoShard, Strategy::FullShard] {
            let got = train(num_ranks, style, Options::default(), init, Cnn::loss, part);
            assert_close(&format!("{style:?} on {num_ranks} ranks"), &got, &expected);
        }
    }
}

/// Counts the collectives of the last graph that it received.
#[derive(Debug)]
struct Count(Arc<AtomicUsize>);

impl GraphTransform for Count {
    fn id(&self) -> PassId {
        PassId::User("count")
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let collectives = graph
            .nodes()
            .iter()
            .filter(|node| node.collective.is_some());
        self.0.store(collectives.count(), Relaxed);
        Ok(graph)
    }
}

#[test]
fn custom_passes_see_the_divided_graph() {
    let _guard = seeded();
    for (num_ranks, style) in [(2, Strategy::FullShard), (2, Strategy::NoShard)] {
        let counts = launch(LaunchConfig::new(num_ranks), move |world: ProcessGroup| {
            let seen = Arc::new(AtomicUsize::new(0));
            let mode = Mode::data_parallel(world.clone(), style);
            let mode = mode.transform(Count(seen.clone())).verified();
            let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
            step.step(1e-2, &tokens(0, world.rank(), 1, &Device::flex()))?;
            Ok::<_, Error>(seen.load(Relaxed))
        });
        for count in counts.unwrap() {
            assert!(
                count > 0,
                "{style:?}: it was called after collectives were inserted"
            );
        }
    }
}
