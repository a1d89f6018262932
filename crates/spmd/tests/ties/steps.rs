//! Steps in every division.

use std::collections::BTreeMap;

use burn::module::ParamGroup;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_fsdp_certificate::{compile, compile_from};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Clip, Mesh, Region};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{CompiledStep, Error, Evaluation, Mode, OptimizerGroups, Precision, Strategy};

use super::eager::{self, adamw};
use super::{Once, ROWS, Tied, WORDS, words};

const STEPS: usize = 5;

type Step = CompiledStep<Tensor<2, Int>, burn::backend::Flex, ()>;

/// Losses and parameters.
type Run = (Vec<f32>, BTreeMap<String, Vec<f32>>);

fn plainly(optimizer: ModuleOptimizer) -> Run {
    let batch = |step, device: &Device| words(step, 0..ROWS, device);
    let trained = eager::train(Once::new, Once::loss, batch, STEPS, |_| 1e-2, optimizer);
    let floats = trained.parameters.into_iter();
    let floats = floats.map(|(path, data)| (path, values(&data)));
    (trained.losses, floats.collect())
}

fn values(data: &TensorData) -> Vec<f32> {
    data.clone().convert::<f32>().try_to_vec().expect("numbers")
}

fn train(world: &ProcessGroup, mut step: Step) -> Result<Run, Error> {
    let each = ROWS / world.size();
    let rows = world.rank() * each..(world.rank() + 1) * each;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        losses.push(step.step(1e-2, &words(index, rows.clone(), &Device::flex()))? as f32);
    }
    Ok((losses, parameters(&mut step)?))
}

/// The parameters, each once. All paths of one parameter must return the same values.
fn parameters(step: &mut Step) -> Result<BTreeMap<String, Vec<f32>>, Error> {
    let mut found = BTreeMap::new();
    for spec in step.parameters().to_vec() {
        let data = step.parameter(&spec.path)?;
        for path in &spec.tied {
            assert_eq!(step.parameter(path)?, data);
        }
        found.insert(spec.path.to_string(), values(&data));
    }
    Ok(found)
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}"))
}

fn assert_close(what: &str, got: &Run, want: &Run) {
    let near = |a: f32, b: f32| (a - b).abs() <= 2e-5 * b.abs().max(1.0);
    let mut losses = got.0.iter().zip(&want.0);
    assert!(
        losses.all(|(a, b)| near(*a, *b)),
        "{what}: {got:?}, {want:?}"
    );
    assert_eq!(got.1.len(), want.1.len(), "{what}");
    for ((path, got), (other, want)) in got.1.iter().zip(&want.1) {
        assert_eq!(path, other, "{what}");
        let mut pairs = got.iter().zip(want);
        assert!(
            pairs.all(|(a, b)| near(*a, *b)),
            "{what}, {path}: {got:?}, {want:?}"
        );
    }
}

fn assert_all(what: &str, runs: &[Run], want: &Run) {
    for run in runs {
        assert_eq!(run, &runs[0], "{what}: ranks differ");
        assert_close(what, run, want);
    }
}

#[test]
fn tied_fields_match_a_single_field() {
    let want = plainly(adamw().init());
    for style in [
        Strategy::NoShard,
        Strategy::ShardGradOp,
        Strategy::FullShard,
    ] {
        for ranks in 1..=4 {
            let runs = on_ranks(ranks, move |world| {
                let mode = Mode::data_parallel(world.clone(), style)
                    .verified()
                    .certified();
                let step = compile(Tied::new, Tied::loss, adamw().build(), mode)?;
                let specs = step.parameters();
                assert_eq!(specs.len(), 2);
                let tied: Vec<&str> = specs[0].tied.iter().map(AsRef::as_ref).collect();
                assert_eq!(
                    (&*specs[0].path, tied),
                    ("embed.weight", vec!["middle.weight", "head.weight"])
                );
                train(&world, step)
            });
            assert_all(&format!("{style:?} on {ranks}"), &runs, &want);
        }
    }
}

#[test]
fn replicas_and_automatic_placements_train_tied_fields() {
    let want = plainly(adamw().init());
    let runs = on_ranks(4, |world| {
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh).expect("a mesh");
        let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard)?.verified();
        train(
            &world,
            compile(Tied::new, Tied::loss, adamw().build(), mode)?,
        )
    });
    assert_all("hybrid", &runs, &want);
    let runs = on_ranks(3, |world| {
        let mode = Mode::data_parallel(world.clone(), burn_fsdp_spmd::DataParallel::Automatic);
        train(
            &world,
            compile(Tied::new, Tied::loss, adamw().build(), mode.verified())?,
        )
    });
    assert_all("automatic", &runs, &want);
}

/// The first path decides the parameter's group, whatever the other paths match.
#[test]
fn the_first_path_decides_the_group() {
    let groups = |names: &'static str| {
        let frozen = SgdConfig::new().build();
        OptimizerGroups::from(adamw().build()).with_group(ParamGroup::from_predicate(names), frozen)
    };
    for names in ["embed", "weight"] {
        let want = plainly(groups(names).into());
        for ranks in 1..=2 {
            let runs = on_ranks(ranks, move |world| {
                let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).verified();
                train(&world, compile(Tied::new, Tied::loss, groups(names), mode)?)
            });
            assert_all(names, &runs, &want);
        }
    }
}

/// Clips two micro-batches by the norm, in which each parameter counts once.
#[test]
fn norms_count_tied_fields_once() {
    let halves = |step: usize, device: &Device| {
        [0..ROWS / 2, ROWS / 2..ROWS]
            .map(|rows| words(step, rows, device))
            .to_vec()
    };
    let norm = |norms: &[f64]| norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
    let (want, norms) = eager::train_clipped(
        Once::new,
        Once::loss,
        halves,
        STEPS,
        adamw().init(),
        (0.01, norm),
    );
    assert!(
        norms.iter().all(|norm| *norm > 0.012),
        "{norms:?}: it clips"
    );
    let floats = want.parameters.into_iter();
    let floats = floats.map(|(path, data)| (path, values(&data)));
    let want: Run = (want.losses, floats.collect());
    for ranks in [1, 2, 3] {
        let runs = on_ranks(ranks, move |world| {
            let options = Options::default().clip_grad_norm(Clip::to(0.01));
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            let mode = mode.options(options).verified();
            let mut step = compile(Tied::new, Tied::loss, adamw().build(), mode)?;
            let each = ROWS / 2 / world.size();
            let mut losses = Vec::new();
            for index in 0..STEPS {
                let parts: Vec<_> = [0, ROWS / 2]
                    .map(|half| half + world.rank() * each)
                    .map(|first| words(index, first..first + each, &Device::flex()))
                    .to_vec();
                losses.push(step.step_accumulated(1e-2, &parts)? as f32);
            }
            Ok((losses, parameters(&mut step)?))
        });
        assert_all("clipped", &runs, &want);
    }
}

#[test]
fn evaluations_read_trained_values_in_all_fields() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let mode = Mode::data_parallel(world, Strategy::FullShard).verified();
            let mut step = compile(Tied::new, Tied::loss, adamw().build(), mode)?;
            let device = Device::flex();
            step.step(1e-1, &words(0, 0..4, &device))?;
            let mut evaluation = Evaluation::new(Tied::new, Tied::logits);
            let batch = words(1, 0..4, &device);
            let got: Tensor<3> = step.evaluate(&mut evaluation, &batch)?;
            let mut once = Once::new(&device);
            let [table, layer] = [
                step.parameter("head.weight")?,
                step.parameter("layer.weight")?,
            ];
            once.embed.weight = once.embed.weight.map(|_| Tensor::from_data(table, &device));
            once.layer.weight = once.layer.weight.map(|_| Tensor::from_data(layer, &device));
            let table = || once.embed.weight.val();
            let want = super::logits(&once.embed, &once.layer, (table(), table()), batch);
            let off = (got - want).abs().max().into_scalar::<f32>();
            assert!(off < 1e-5, "{off}");
            Ok(())
        });
    }
}

/// Files may use any of the names.
#[test]
fn tied_parameters_are_read_and_set_under_any_path() {
    for names in [
        &["embed.weight"][..],
        &["head.weight"],
        &["middle.weight", "head.weight"],
        &["embed.weight", "head.weight"],
    ] {
        on_ranks(2, move |world| {
            let mode = Mode::data_parallel(world, Strategy::FullShard);
            let read = |shard: &burn_fsdp_spmd::ShardSpec<'_>| {
                let Region::Flat(range) = &shard.region else {
                    return Ok(None);
                };
                let is_read = names.contains(&&*shard.whole.path);
                let values: Vec<f32> = range.clone().map(|i| i as f32).collect();
                Ok::<_, Error>(is_read.then(|| TensorData::new(values, shard.shape.clone())))
            };
            let mut step: Step = compile_from(Tied::new, read, Tied::loss, adamw().build(), mode)?;
            let table = values(&step.parameter("embed.weight")?);
            assert!(
                table
                    .iter()
                    .enumerate()
                    .all(|(i, value)| i as f32 == *value)
            );
            let other = vec![0.5f32; table.len()];
            let other = TensorData::new(other, [WORDS, table.len() / WORDS]);
            step.set_parameter("head.weight", other.clone())?;
            assert_eq!(step.parameter("embed.weight")?, other);
            step.step(1e-2, &words(0, 0..4, &Device::flex()))?;
            step.set_parameter("middle.weight", other.clone())?;
            assert_eq!(step.parameter("embed.weight")?, other);
            Ok(())
        });
    }
}

/// In 16 bits, steps match a module with one field bit for bit.
#[test]
fn tied_fields_compute_in_one_type() {
    for ranks in 1..=2 {
        on_ranks(ranks, |world| {
            let precision = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
            let mode = || {
                let options = Options::default().precision(precision.clone());
                Mode::data_parallel(world.clone(), Strategy::FullShard).options(options)
            };
            let batch = words(0, 0..4, &Device::flex());
            let mut tied = compile(Tied::new, Tied::loss, adamw().build(), mode())?;
            let mut once = compile(Once::new, Once::loss, adamw().build(), mode())?;
            for _ in 0..3 {
                let [a, b] = [tied.step(1e-2, &batch)?, once.step(1e-2, &batch)?];
                assert_eq!(a, b);
            }
            let [a, b] = [
                tied.parameter("embed.weight")?,
                once.parameter("embed.weight")?,
            ];
            assert_eq!(a, b);
            Ok(())
        });
    }
}
