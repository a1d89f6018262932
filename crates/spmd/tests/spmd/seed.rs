//! Random numbers from a seed: the same as one rank's, however ranks divide the step.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Distribution, Int, Shape, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::graph::{Draw, Graph, Phase};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{GraphTransform, PassId};
use burn_fsdp_spmd::{DataParallel, Error, Expand, Mode};

use crate::compiled::seeded;
use crate::eager::adamw;
use crate::models::{Encoder, rows_of_sequences, sequences};
use crate::placement::{Trained, mesh, trained};

const SHAPE: [usize; 3] = [12, 6, 12];
const SEED: u64 = 7;

type Drawn = (Tensor<3>, Tensor<3>);
type Bits = Vec<Vec<u32>>;

/// Returns two sets of random numbers with the batch's placement; the batch consists of ones.
fn drawn_twice(x: &Tensor<3>, distribution: Distribution) -> Drawn {
    let first = x.clone() * x.random_like(distribution);
    let second = x.clone() * x.random_like(distribution);
    (first, second)
}

fn init(device: &Device) -> Linear {
    LinearConfig::new(SHAPE[2], 1).init(device)
}

fn floats(tensor: &Tensor<3>) -> Vec<f32> {
    let data = tensor.clone().into_data().convert_dtype(DType::F32);
    data.try_to_vec().unwrap()
}

fn bits((first, second): &Drawn) -> Bits {
    let of = |tensor| floats(tensor).into_iter().map(f32::to_bits).collect();
    vec![of(first), of(second)]
}

/// Returns the numbers that each rank draws in each of three steps, for its part of the batch.
fn draws(
    num_ranks: usize,
    mode: impl Fn(&ProcessGroup) -> Result<Mode, Error> + Send + Sync + Clone + 'static,
    part: [usize; 3],
    distribution: Distribution,
) -> Vec<Vec<Bits>> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let loss = move |model: &Linear, x: Tensor<3>| {
            let drawn = drawn_twice(&x, distribution);
            let loss = model.forward(drawn.0.clone() + drawn.1.clone()).mean();
            (loss, drawn)
        };
        let mut step = compile(init, loss, adamw().build(), mode(&world)?.verified())?;
        let x = Tensor::ones(part, &Device::flex());
        (0..3)
            .map(|_| {
                step.step(1e-2, &x)?;
                Ok(bits(&step.outputs()?[0]))
            })
            .collect()
    };
    launch(LaunchConfig::new(num_ranks), body).unwrap()
}

fn one_rank(seed: u64, distribution: Distribution) -> Vec<Bits> {
    let mode = move |_: &ProcessGroup| Ok(Mode::single().seeded(seed));
    draws(1, mode, SHAPE, distribution).remove(0)
}

/// Cuts of the batch on the axes of a mesh.
type Cuts = &'static [(&'static str, usize, Option<usize>)];

fn placed(cuts: Cuts) -> impl Fn(&ProcessGroup) -> Result<Mode, Error> + Send + Sync + Clone {
    move |world: &ProcessGroup| {
        let axes: Vec<_> = cuts.iter().map(|(name, size, _)| (*name, *size)).collect();
        let cut = cuts
            .iter()
            .filter_map(|(name, _, dim)| Some((name, (*dim)?)));
        let expand = cut.fold(Expand::new(), |expand, (axis, dim)| {
            expand.input("**", axis, Shard(dim))
        });
        Ok(Mode::expand(mesh(world, &axes)?, expand).seeded(SEED))
    }
}

#[test]
fn every_division_draws_the_numbers_of_one_rank() {
    let _guard = seeded();
    let all: [Cuts; 7] = [
        &[("data", 1, Some(0))],
        &[("data", 2, Some(0))],
        &[("data", 3, Some(1))],
        &[("data", 4, Some(2))],
        &[("data", 3, None)],
        &[("data", 2, Some(0)), ("model", 2, None)],
        &[("data", 2, Some(2)), ("model", 2, Some(1))],
    ];
    for distribution in [
        Distribution::Default,
        Distribution::Bernoulli(0.75),
        Distribution::Uniform(-3.0, 5.0),
        Distribution::Normal(1.0, 2.0),
    ] {
        let expected = one_rank(SEED, distribution);
        for cuts in all {
            let num_ranks = cuts.iter().map(|(_, size, _)| size).product();
            let mut part = SHAPE;
            for (_, size, dim) in cuts {
                if let Some(dim) = dim {
                    part[*dim] /= size;
                }
            }
            for (rank, got) in draws(num_ranks, placed(cuts), part, distribution)
                .iter()
                .enumerate()
            {
                assert!(*got == expected, "{distribution:?}, {cuts:?}, rank {rank}");
            }
        }
        let automatic = |world: &ProcessGroup| {
            Ok(Mode::data_parallel(world.clone(), DataParallel::Automatic).seeded(SEED))
        };
        for got in draws(2, automatic, [6, 6, 12], distribution) {
            assert!(got == expected, "{distribution:?}, automatic");
        }
    }
}

#[test]
fn draws_differ_and_follow_their_distribution() {
    let _guard = seeded();
    let distribution = Distribution::Normal(1.0, 2.0);
    let of_seeds = [SEED, SEED + 1].map(|seed| one_rank(seed, distribution));
    let all: Vec<&Vec<u32>> = of_seeds.iter().flatten().flatten().collect();
    assert_eq!(all.len(), 2 * 3 * 2);
    let mut rows: Vec<&[u32]> = all.iter().flat_map(|draw| draw.chunks(SHAPE[2])).collect();
    let num_rows = rows.len();
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(rows.len(), num_rows, "rows are alike");
    let numbers = all
        .iter()
        .copied()
        .flatten()
        .map(|bits| f32::from_bits(*bits));
    let numbers: Vec<f64> = numbers.map(f64::from).collect();
    let len = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / len;
    let variance = numbers.iter().map(|of| (of - mean).powi(2)).sum::<f64>() / len;
    // 10,368 numbers: six standard errors.
    assert!((mean - 1.0).abs() < 0.12, "mean {mean}");
    assert!(
        (variance.sqrt() - 2.0).abs() < 0.09,
        "deviation {}",
        variance.sqrt()
    );
    let kept = one_rank(SEED, Distribution::Bernoulli(0.75));
    let kept: Vec<f32> = kept
        .into_iter()
        .flatten()
        .flatten()
        .map(f32::from_bits)
        .collect();
    assert!(kept.iter().all(|of| *of == 0.0 || *of == 1.0));
    let share = kept.iter().sum::<f32>() / kept.len() as f32;
    assert!((share - 0.75).abs() < 0.04, "{share} are kept");
}

/// Returns integers, and floats of other types.
fn drawn_in_types(x: &Tensor<3>) -> Drawn {
    let (shape, device) = (Shape::from(x.dims()), x.device());
    let classes = Tensor::<3, Int>::random(shape, Distribution::Uniform(0.0, 100.0), &device);
    let double = x.clone().cast(DType::F64);
    let double = double.random_like(Distribution::Default).cast(DType::F32);
    let half = x.clone().cast(DType::BF16);
    let half = half.random_like(Distribution::Default).cast(DType::F32);
    (x.clone() * classes.float(), x.clone() * double + half)
}

#[test]
fn integers_and_other_floats_match_one_rank() {
    let _guard = seeded();
    let run = |num_ranks: usize| {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let loss = |model: &Linear, x: Tensor<3>| {
                let drawn = drawn_in_types(&x);
                (model.forward(drawn.1.clone()).mean(), drawn)
            };
            let axes = [("data", world.size())];
            let expand = Expand::new().input("**", "data", Shard(1));
            let mode = Mode::expand(mesh(&world, &axes)?, expand).seeded(SEED);
            let mut step = compile(init, loss, adamw().build(), mode.verified())?;
            let x = Tensor::ones([12, 6 / world.size(), 12], &Device::flex());
            step.step(1e-2, &x)?;
            Ok(step.outputs()?.remove(0))
        };
        launch(LaunchConfig::new(num_ranks), body).unwrap()
    };
    let expected = run(1).remove(0);
    let classes = floats(&expected.0);
    assert!(
        classes
            .iter()
            .all(|of| (0.0..100.0).contains(of) && of.fract() == 0.0)
    );
    assert!(classes.iter().any(|of| *of > 50.0));
    for num_ranks in [2, 3] {
        for got in run(num_ranks) {
            assert_eq!(bits(&got), bits(&expected), "{num_ranks} ranks");
        }
    }
}

fn assert_close(what: &str, (losses, parameters): &Trained, expected: &Trained) {
    for (loss, expected) in losses.iter().zip(&expected.0) {
        let difference = (loss - expected).abs() / expected.abs();
        assert!(difference <= 1e-5, "{what}: {loss} is not {expected}");
    }
    for (path, expected) in &expected.1 {
        let sizes = expected.iter().map(|value| value.abs());
        let largest = sizes.fold(0.1, f32::max);
        for (value, expected) in parameters[path].iter().zip(expected) {
            let difference = (value - expected).abs();
            assert!(
                difference <= 1e-4 * largest,
                "{what}, {path}: {value} is not {expected}"
            );
        }
    }
}

/// Trains Burn's encoder with its dropout, in attention and in its feed-forward layers.
fn encoder(
    num_ranks: usize,
    mode: impl Fn(&ProcessGroup) -> Result<Mode, Error> + Send + Sync + Clone + 'static,
    num_parts: usize,
) -> Trained {
    let rows = 4 / num_parts;
    let each = num_ranks / num_parts;
    trained(
        num_ranks,
        mode,
        Encoder::new,
        Encoder::loss,
        move |step, rank, device| {
            let first = rank / each * rows;
            rows_of_sequences(step, 8, first..first + rows, device)
        },
    )
}

#[test]
fn dropout_by_placements_trains_like_one_rank() {
    let _guard = seeded();
    let single = |_: &ProcessGroup| Ok(Mode::single().seeded(SEED));
    let expected = encoder(1, single, 1);
    let other = |_: &ProcessGroup| Ok(Mode::single().seeded(SEED + 1));
    assert_ne!(encoder(1, other, 1).0, expected.0, "dropout drops nothing");
    let composed = |_: &ProcessGroup| {
        let options = Options::default().kernels(false);
        Ok(Mode::single().seeded(SEED).options(options))
    };
    assert_close("composed", &encoder(1, composed, 1), &expected);
    let late = |_: &ProcessGroup| {
        let options = Options::default().optimizer(OptimizerPlace::InNextForward);
        Ok(Mode::single().seeded(SEED).options(options))
    };
    assert_close("in next forward", &encoder(1, late, 1), &expected);
    for (axes, num_parts) in [
        (&[("data", 1), ("model", 2)][..], 1),
        (&[("data", 2), ("model", 1)], 2),
        (&[("data", 2), ("model", 2)], 2),
        (&[("data", 4), ("model", 1)], 4),
    ] {
        let mode = move |world: &ProcessGroup| {
            let weights = "encoder.layers.*.pwff.linear_inner.weight";
            let expand = Expand::new().parameter(weights, "model", Shard(1));
            let expand = expand.input("**", "data", Shard(0));
            Ok(Mode::expand(mesh(world, axes)?, expand)
                .seeded(SEED)
                .certified())
        };
        let num_ranks = axes.iter().map(|(_, size)| size).product();
        let got = encoder(num_ranks, mode, num_parts);
        assert_close(&format!("{axes:?}"), &got, &expected);
    }
}

/// Returns the bytes that collectives of forward gather or reduce.
fn moved(graph: &Graph) -> usize {
    let forward = graph.nodes().iter();
    let forward = forward.filter(|node| node.phase == Phase::Forward);
    let collectives = forward.filter_map(|node| node.collective.as_ref());
    let parts = collectives.flat_map(|collective| &collective.parts);
    parts.map(|part| part.num_bytes()).sum()
}

#[test]
fn replicated_draws_are_repeated_not_gathered() {
    let _guard = seeded();
    let graph = |seed: Option<u64>| {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let mode = Mode::expand(mesh(&world, &[("model", 2)])?, Expand::new());
            let mode = match seed {
                Some(seed) => mode.seeded(seed),
                None => mode,
            };
            let mut step = compile(Encoder::new, Encoder::loss, adamw().build(), mode)?;
            step.step(1e-2, &sequences(0, 8, &Device::flex()))?;
            Ok::<_, Error>(step.graph().unwrap().clone())
        };
        launch(LaunchConfig::new(2), body).unwrap().remove(0)
    };
    assert!(moved(&graph(None)) > 0);
    assert_eq!(moved(&graph(Some(SEED))), 0);
}

/// A pass that changes the parts that ranks draw. It has the name of one of the crate's passes, because changes by a
/// user's pass are not proved.
#[derive(Debug)]
struct WrongPart(fn(&mut Draw));

impl GraphTransform for WrongPart {
    fn id(&self) -> PassId {
        PassId::Split
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        let draws = nodes.iter_mut().filter_map(|node| node.draw.as_mut());
        draws.for_each(self.0);
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

/// Returns the error of a plan whose draws are changed in this way.
fn refused(change: fn(&mut Draw), is_certified: bool) -> Error {
    let errors = launch(LaunchConfig::new(2), move |world: ProcessGroup| {
        let expand = Expand::new().input("**", "data", Shard(0));
        let mode = Mode::expand(mesh(&world, &[("data", 2)])?, expand).seeded(SEED);
        // That pass is otherwise not in the plan.
        let options = Options::default().bucket(None).prefetch(false);
        let mode = mode.options(options).transform(WrongPart(change));
        let mode = if is_certified { mode.certified() } else { mode };
        let mut step = compile(Encoder::new, Encoder::loss, adamw().build(), mode)?;
        let x = rows_of_sequences(0, 8, 0..2, &Device::flex());
        Ok::<_, Error>(step.step(1e-2, &x).unwrap_err())
    });
    errors.unwrap().remove(1)
}

#[test]
fn a_plan_whose_ranks_draw_the_wrong_part_is_refused() {
    let _guard = seeded();
    // Every rank draws the part of the first.
    let error = refused(
        |draw| draw.shifts.iter_mut().for_each(|of| of.len = 0),
        true,
    );
    assert!(matches!(error, Error::NotCertified { .. }), "{error}");
    // The types themselves show that nothing is cut.
    let error = refused(|draw| draw.shifts.clear(), false).to_string();
    assert!(error.contains("it draws values that are"), "{error}");
}

/// Returns noise whose shape no number of ranks divides.
fn shared_noise(model: &Linear, x: Tensor<3>) -> (Tensor<1>, Drawn) {
    let shape = [1, 1, SHAPE[2] + 1];
    let noise = Tensor::<3>::random(shape, Distribution::Default, &x.device());
    let own = x * noise.clone().narrow(2, 0, SHAPE[2]);
    (model.forward(own.clone()).mean(), (own, noise))
}

#[test]
fn unsplittable_draws_are_repeated_on_all_ranks() {
    let _guard = seeded();
    let run = |num_ranks: usize, is_placed: bool| {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let size = world.size();
            let mode = if is_placed {
                placed(&[("data", 3, Some(0))])(&world)?
            } else {
                Mode::data_parallel(world, DataParallel::Automatic).seeded(SEED)
            };
            let mut step = compile(init, shared_noise, adamw().build(), mode.verified())?;
            let x = Tensor::ones([12 / size, 6, 12], &Device::flex());
            step.step(1e-2, &x)?;
            Ok(bits(&step.outputs()?[0]))
        };
        launch(LaunchConfig::new(num_ranks), body).unwrap()
    };
    let expected = run(1, false).remove(0);
    for (num_ranks, is_placed) in [(2, false), (3, false), (3, true)] {
        for got in run(num_ranks, is_placed) {
            assert_eq!(got, expected, "{num_ranks} ranks");
        }
    }
}

/// Losses of micro-batches with placements, with units that are recomputed.
#[test]
fn micro_batches_and_recomputed_units_draw_the_numbers_of_one_rank() {
    let _guard = seeded();
    let run = |num_ranks: usize| {
        Device::flex().seed(1);
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let (size, rank) = (world.size(), world.rank());
            let expand = Expand::new().input("**", "data", Shard(0));
            let mode = Mode::expand(mesh(&world, &[("data", size)])?, expand).seeded(SEED);
            let options = Options::default().recompute_units(["encoder.layers.*"]);
            let mode = mode.options(options).verified();
            let mut step = compile(Encoder::new, Encoder::loss, adamw().build(), mode)?;
            let rows = 4 / size;
            let part = |of: usize| {
                rows_of_sequences(of, 8, rank * rows..(rank + 1) * rows, &Device::flex())
            };
            let mut losses = Vec::new();
            for index in 0..4 {
                losses.push(step.step_accumulated(1e-2, &[part(index), part(index + 9)])?);
            }
            Ok(losses)
        };
        launch(LaunchConfig::new(num_ranks), body)
            .unwrap()
            .remove(0)
    };
    let expected = run(1);
    for num_ranks in [2, 4] {
        for (got, expected) in run(num_ranks).iter().zip(&expected) {
            let difference = (got - expected).abs() / expected.abs();
            assert!(
                difference <= 1e-5,
                "{num_ranks} ranks: {got} is not {expected}"
            );
        }
    }
}

#[test]
fn data_parallel_runs_are_repeatable_and_ranks_draw_different_numbers() {
    let _guard = seeded();
    let replicate = |world: &ProcessGroup, strategy: Strategy| {
        Mode::hybrid(
            mesh(world, &[("replicate", 2), ("shard", 2)])?,
            "replicate",
            strategy,
        )
    };
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
        let line = move |world: &ProcessGroup| {
            Ok(Mode::data_parallel(world.clone(), strategy).seeded(SEED))
        };
        let hybrid = move |world: &ProcessGroup| Ok(replicate(world, strategy)?.seeded(SEED));
        let distribution = Distribution::Bernoulli(0.5);
        for first in [
            draws(4, line, SHAPE, distribution),
            draws(4, hybrid, SHAPE, distribution),
        ] {
            assert_eq!(first[0], one_rank(SEED, distribution));
            for rank in 1..4 {
                assert!(first[..rank].iter().all(|other| *other != first[rank]));
            }
            assert_eq!(first, draws(4, line, SHAPE, distribution));
        }
        assert_eq!(encoder(2, line, 2), encoder(2, line, 2));
    }
}

#[test]
fn resumed_runs_and_micro_batches_continue_the_draws() {
    let _guard = seeded();
    let distribution = Distribution::Default;
    let expected = one_rank(SEED, distribution);
    let loss = move |model: &Linear, x: Tensor<3>| {
        let drawn = drawn_twice(&x, distribution);
        (
            model.forward(drawn.0.clone() + drawn.1.clone()).mean(),
            drawn,
        )
    };
    let x = Tensor::<3>::ones(SHAPE, &Device::flex());
    // No states, which a resumed run would need.
    let sgd = || burn::optim::SgdConfig::new().build();
    let mut step = compile(init, loss, sgd(), Mode::single().seeded(SEED)).unwrap();
    step.resume(2, 1e-2).unwrap();
    step.step(1e-2, &x).unwrap();
    assert_eq!(bits(&step.outputs().unwrap()[0]), expected[2]);
    let error = step.resume(1, 1e-2).unwrap_err();
    assert!(
        matches!(error, Error::Backwards { done: 3, steps: 1 }),
        "{error}"
    );

    let mut step = compile(init, loss, sgd(), Mode::single().seeded(SEED)).unwrap();
    step.step_accumulated(1e-2, &[x.clone(), x.clone(), x.clone()])
        .unwrap();
    let all: Vec<Bits> = step.outputs().unwrap().iter().map(bits).collect();
    assert_eq!(all.len(), 3);
    assert_eq!(all[0], expected[0]);
    assert!(all[1] != all[0] && all[2] != all[0] && all[2] != all[1]);
    assert!(!expected.contains(&all[1]));
    step.step(1e-2, &x).unwrap();
    assert_eq!(bits(&step.outputs().unwrap()[0]), expected[1]);
}

#[test]
fn ranks_of_different_seeds_or_steps_are_refused() {
    let _guard = seeded();
    for by_seed in [true, false] {
        let results = launch(LaunchConfig::new(2), move |world: ProcessGroup| {
            let rank = world.rank() as u64;
            let mode = Mode::data_parallel(world, Strategy::FullShard);
            let mode = mode.seeded(if by_seed { rank } else { SEED });
            let sgd = burn::optim::SgdConfig::new().build();
            let mut step = compile(Encoder::new, Encoder::loss, sgd, mode)?;
            if !by_seed {
                step.resume(2 + rank, 1e-2)?;
            }
            Ok::<_, Error>(
                step.step(1e-2, &sequences(0, 8, &Device::flex()))
                    .unwrap_err(),
            )
        });
        for error in results.unwrap() {
            assert!(matches!(error, Error::GraphsDiffer { .. }), "{error}");
        }
    }
}
