//! Models that cast nothing, in 16 bits, in both engines, compared with Burn's loop on one rank.

mod by_hand;
mod nets;
mod plain;

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_fsdp::compile::{Batch, BatchMapper, Evaluation, LossScaling, Mode, Options, compile};
use burn_fsdp::internals::compile::cast_floats;
use burn_fsdp::internals::state::full_state;
use burn_fsdp::state::into_record;
use burn_fsdp::{
    Error, LaunchConfig, Precision, ProcessGroup, ShardPolicy, Strategy, backward, cast_input,
    catch, fully_shard, launch,
};

use nets::{By, Kind, Net, ROWS, STATEFUL, STATELESS, batch};
use plain::{RATE, STEPS, Step, plainly, sgd, tensors};

const HALVES: [FloatDType; 2] = [FloatDType::BF16, FloatDType::F16];

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

/// A policy with a unit for each layer that has parameters.
fn units(kind: Kind) -> ShardPolicy {
    match kind {
        Kind::PlainGroupNorm => ShardPolicy::new().units(["first"]),
        _ => ShardPolicy::new().units(["first", "layer"]),
    }
}

/// Trains a sharded model, with the mean of the ranks' losses.
fn by_units(kind: Kind, precision: &Precision, ranks: usize) -> Vec<Step> {
    let precision = precision.clone();
    let body = move |world: ProcessGroup| -> Result<Vec<Step>, Error> {
        let device = device();
        let policy = units(kind).precision(precision.clone());
        let mut model = fully_shard(Net::new(kind, &device), &world, policy)?;
        let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
        let mut steps = Vec::new();
        for step in 0..STEPS {
            let x = cast_input(&model, batch(step, world.rank(), &device))?;
            let loss = catch(|| model.loss(x, By::Burn))?;
            let value = loss.clone().into_scalar::<f32>();
            let gradients = backward(loss, &model)?;
            model = catch(|| optimizer.step(RATE, model, gradients))?;
            let record = into_record(model.clone())?;
            let whole = Net::new(kind, &device).load_record(record);
            steps.push(Step {
                loss: value,
                tensors: tensors(&whole),
            });
        }
        Ok(steps)
    };
    joined(launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}")))
}

/// Returns the common outcome of all ranks, with the mean of their losses.
fn joined(of_ranks: Vec<Vec<Step>>) -> Vec<Step> {
    let mut joined = of_ranks[0].clone();
    for (number, step) in joined.iter_mut().enumerate() {
        let losses = of_ranks.iter().map(|steps| steps[number].loss);
        step.loss = losses.sum::<f32>() / of_ranks.len() as f32;
    }
    joined
}

fn compiled(
    kind: Kind,
    compute: FloatDType,
    ranks: usize,
    (strategy, kernels): (Strategy, bool),
) -> Vec<Step> {
    let body = move |world: ProcessGroup| -> Result<Vec<Step>, Error> {
        // The scale is one: the comparison does not test how much of a gradient survives.
        let scaling = LossScaling {
            initial_scale: 1.0,
            ..LossScaling::default()
        };
        let options = Options::default()
            .kernels(kernels)
            .precision(Precision::new(compute))
            .scale_loss((compute == FloatDType::F16).then_some(scaling));
        let mode = Mode::data_parallel(world.clone(), strategy).options(options);
        let init = move |device: &Device| Net::new(kind, device);
        let loss = move |model: &Net, x: Tensor<3>| model.loss(x.cast(compute), By::Burn);
        let mut step = compile(init, loss, sgd(), mode.verified())?;
        let mut steps = Vec::new();
        for number in 0..STEPS {
            let x = batch(number, world.rank(), &Device::flex());
            let loss = step.step(RATE, &x)? as f32;
            let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
            let mut tensors = BTreeMap::new();
            for path in paths {
                let data = step.parameter(&path)?;
                if data.dtype() == DType::F32 {
                    tensors.insert(path.to_string(), data.try_to_vec().expect("f32"));
                }
            }
            steps.push(Step { loss, tensors });
        }
        Ok(steps)
    };
    joined(launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}")))
}

/// Compares losses and tensors, relative to the largest of each.
fn assert_close(what: &str, got: &[Step], want: &[Step], tolerance: f32, has_running: bool) {
    assert_eq!(got.len(), want.len());
    for (number, (got, want)) in got.iter().zip(want).enumerate() {
        let loss = (got.loss - want.loss).abs() / want.loss.abs();
        assert!(
            loss <= tolerance,
            "{what}, step {number}: loss {} is not {}",
            got.loss,
            want.loss
        );
        let mut compared = 0;
        for (path, want) in &want.tensors {
            if path.contains("running_") && !has_running {
                continue;
            }
            let got = &got.tensors[path];
            assert_eq!(got.len(), want.len(), "{what}: {path}");
            let scale = want
                .iter()
                .fold(1e-3_f32, |max, value| max.max(value.abs()));
            for (got, want) in got.iter().zip(want) {
                let far = (got - want).abs() / scale;
                assert!(
                    far <= tolerance,
                    "{what}, step {number}, {path}: {got} is not {want}"
                );
            }
            compared += 1;
        }
        assert!(compared >= 4, "{what}");
    }
}

#[test]
fn models_train_unchanged_in_the_eager_engine() {
    for kind in STATELESS {
        for compute in HALVES {
            for ranks in 1..=4 {
                let want = plainly(kind, compute, ranks);
                let got = by_units(kind, &Precision::new(compute), ranks);
                let what = format!("{kind:?} in {compute:?} on {ranks}");
                // Gradients of tensors that are used twice are added in a different order, in 16 bits.
                let tolerance = match (kind, compute) {
                    (Kind::Decoder, FloatDType::BF16) => 0.1,
                    (Kind::Decoder, _) => 0.02,
                    _ => 1e-5,
                };
                assert_close(&what, &got, &want, tolerance, false);
            }
        }
    }
}

#[test]
fn models_train_unchanged_in_compiled_steps() {
    for kind in STATELESS.into_iter().chain(STATEFUL) {
        for compute in HALVES {
            for ranks in 1..=4 {
                let want = plainly(kind, compute, ranks);
                let strategy = match ranks % 2 {
                    0 => Strategy::FullShard,
                    _ => Strategy::ShardGradOp,
                };
                let what = format!("{kind:?} in {compute:?} on {ranks}");
                let got = compiled(kind, compute, ranks, (strategy, false));
                // Each rank has its own running states: rank 0's have seen only its batches if it is the only rank.
                assert_close(&what, &got, &want, 1e-5, ranks == 1);
                if ranks == 2 {
                    let got = compiled(kind, compute, ranks, (strategy, true));
                    let tolerance = match compute {
                        FloatDType::BF16 => 0.1,
                        _ => 0.02,
                    };
                    assert_close(&format!("{what}, kernels"), &got, &want, tolerance, false);
                }
            }
        }
    }
}

/// An average that moves by less than the last of 16 bits still moves.
#[test]
fn running_statistics_are_not_rounded_away() {
    let kept = |steps: &[Step]| steps[STEPS - 1].tensors["layer.BatchNorm.running_var"].clone();
    let want = plainly(Kind::BatchNorm, FloatDType::BF16, 1);
    let got = compiled(
        Kind::BatchNorm,
        FloatDType::BF16,
        1,
        (Strategy::FullShard, false),
    );
    for (got, want) in kept(&got).iter().zip(kept(&want)) {
        assert!((got - want).abs() < 1e-6, "{got} is not {want}");
        assert!(
            burn::tensor::bf16::from_f32(*got).to_f32() != *got,
            "{got} has 16 bits"
        );
    }
}

/// Evaluation computes in the same types, with unchanged statistics.
#[test]
fn layers_with_states_are_evaluated_in_halves() {
    for kind in STATEFUL {
        let compute = FloatDType::BF16;
        let options = Options::default().precision(Precision::new(compute));
        let init = move |device: &Device| Net::new(kind, device);
        let forward = move |model: &Net, x: Tensor<3>| model.forward(x.cast(compute), By::Burn);
        let loss = move |model: &Net, x: Tensor<3>| model.loss(x.cast(compute), By::Burn);
        let mode = Mode::single().options(options);
        let mut step = compile(init, loss, sgd(), mode).expect("compiles");
        let mut evaluation = Evaluation::new(init, forward);
        let x = batch(0, 0, &Device::flex());
        let got: Tensor<3> = step.evaluate(&mut evaluation, &x).expect("evaluates");
        let whole = Net::new(kind, &Device::flex()).forward(x, By::Burn);
        let got = got.into_data().convert::<f32>();
        let tolerance = burn::tensor::Tolerance::absolute(0.05);
        got.assert_approx_eq::<f32>(&whole.into_data(), tolerance);
    }
}

/// Models with which Burn would panic are refused by name, and the suggested remedy works.
#[test]
fn layers_with_states_are_refused_by_the_eager_engine() {
    for kind in STATEFUL {
        let said = launch(LaunchConfig::new(2), move |world| {
            let device = device();
            let policy = ShardPolicy::new().precision(Precision::new(FloatDType::BF16));
            let model = fully_shard(Net::new(kind, &device), &world, policy)?;
            let x = cast_input(&model, batch(0, world.rank(), &device))?;
            let loss = catch(|| model.loss(x, By::Burn));
            let said = loss.err().map(|error| error.to_string());
            // Its values can still be read.
            full_state(&model, |_| {})?;
            Ok::<_, Error>(said.unwrap_or_default())
        });
        let name = match kind {
            Kind::BiLstm => "Lstm".to_owned(),
            other => format!("{other:?}"),
        };
        for said in said.expect("both ranks say it") {
            let is_named = said.contains("`layer") && said.contains(&format!("({name})"));
            assert!(is_named && said.contains("full_in"), "{kind:?}: {said}");
            assert!(
                said.contains("F32") && said.contains("BF16"),
                "{kind:?}: {said}"
            );
        }
    }
}

/// An unforeseeable clash of two types is reported with the parameter that was read last.
#[test]
fn mixed_dtypes_are_named_in_the_error() {
    let device = device();
    let precision = Precision::new(FloatDType::BF16).full_in(["layer"]);
    let policy = ShardPolicy::new().precision(precision);
    let model = Net::new(Kind::LayerNorm, &device);
    let model = fully_shard(model, &ProcessGroup::solo(), policy).expect("shards");
    let x = cast_input(&model, batch(0, 0, &device)).expect("is sharded");
    let said = catch(|| model.loss(x, By::Burn)).expect_err("two types met");
    let said = said.to_string();
    assert!(
        said.contains("layer.LayerNorm.beta") && said.contains("F32"),
        "{said}"
    );
    burn_fsdp::internals::state::reset(&model).expect("is sharded");
}

/// A module may be stored in any type of floats, and computes in it.
#[test]
fn modules_are_stored_in_other_types() {
    for kind in STATELESS {
        for stored in [FloatDType::BF16, FloatDType::F16, FloatDType::F64] {
            for ranks in [1, 3] {
                let want = stored_plainly(kind, stored, ranks);
                let got = launch(LaunchConfig::new(ranks), move |world| {
                    let device = device();
                    let model = stored_as(kind, stored, &device);
                    let mut model = fully_shard(model, &world, units(kind))?;
                    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
                    for step in 0..STEPS {
                        let x = cast_input(&model, batch(step, world.rank(), &device))?;
                        assert_eq!(x.dtype(), DType::from(stored));
                        let gradients = backward(catch(|| model.loss(x, By::Burn))?, &model)?;
                        model = catch(|| optimizer.step(RATE, model, gradients))?;
                    }
                    let record = into_record(model)?;
                    let whole = stored_as(kind, stored, &device).load_record(record);
                    assert_eq!(whole.dtype(), DType::from(stored));
                    Ok::<_, Error>(tensors(&whole))
                });
                let tolerance = match stored {
                    // The master also has the last bit.
                    FloatDType::BF16 => 0.02,
                    FloatDType::F16 => 0.003,
                    _ => 1e-6,
                };
                let got = got.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                let step = |tensors| Step { loss: 1.0, tensors };
                let what = format!("{kind:?} stored in {stored:?} on {ranks}");
                let got = [step(got[0].clone())];
                assert_close(&what, &got, &[step(want)], tolerance, false);
            }
        }
    }
}

fn stored_as(kind: Kind, stored: FloatDType, device: &Device) -> Net {
    plain::kept_in(Net::new(kind, device), stored)
}

fn stored_plainly(kind: Kind, stored: FloatDType, ranks: usize) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut model = stored_as(kind, stored, &device);
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let losses = (0..ranks).map(|rank| {
            let x = batch(step, rank, &device).cast(stored);
            model.loss(x, By::Burn)
        });
        let gradients =
            losses.map(|loss| burn::optim::GradientsParams::from_grads(loss.backward(), &model));
        let gradients: Vec<_> = gradients.collect();
        let mean = plain::mean(&model, &gradients);
        model = optimizer.step(RATE, model, mean);
    }
    tensors(&model)
}

#[derive(Clone)]
struct Labelled {
    images: Tensor<4>,
    labels: Tensor<1, Int>,
    classes: usize,
}

impl Batch for Labelled {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("classes", &self.classes);
        Self {
            images: mapper.float("images", self.images),
            labels: mapper.int("labels", self.labels),
            ..self
        }
    }
}

/// Floats at any depth are cast, and nothing else changes.
#[test]
fn nested_inputs_are_cast() {
    let device = device();
    let policy = ShardPolicy::new().precision(Precision::new(FloatDType::F16));
    let model = Net::new(Kind::LayerNorm, &device);
    let model = fully_shard(model, &ProcessGroup::solo(), policy).expect("shards");
    let wide = || Tensor::<2>::ones([2, 3], &device);
    let labelled = Labelled {
        images: Tensor::ones([1, 2, 3, 4], &device),
        labels: Tensor::ones([2], &device),
        classes: 7,
    };
    let by_name: HashMap<String, Tensor<2>> =
        ["b", "a"].map(|name| (name.to_owned(), wide())).into();
    let by_number: BTreeMap<usize, Option<Tensor<2>>> = [(3, Some(wide())), (4, None)].into();
    let mask = Tensor::<1, Bool>::full([2], true, &device);
    let nest = (
        vec![labelled.clone(), labelled],
        (by_name, mask),
        [by_number],
        Box::new(wide()),
        (),
    );
    let cast = cast_input(&model, nest).expect("is sharded");
    let (rows, (by_name, mask), [by_number], boxed, ()) = cast;
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!((row.images.dtype(), row.classes), (DType::F16, 7));
        assert_eq!(row.images.dims(), [1, 2, 3, 4]);
        assert_eq!(
            row.labels.dtype(),
            Tensor::<1, Int>::ones([2], &device).dtype()
        );
    }
    assert_eq!(by_name.len(), 2);
    assert!(by_name["a"].dtype() == DType::F16 && by_name["b"].dtype() == DType::F16);
    assert_eq!(
        mask.into_data().try_to_vec::<bool>().expect("flags"),
        [true, true]
    );
    assert_eq!(by_number[&3].as_ref().map(Tensor::dtype), Some(DType::F16));
    assert!(by_number[&4].is_none());
    assert_eq!(boxed.dtype(), DType::F16);
    assert_eq!(cast_floats(*boxed, DType::F64).dtype(), DType::F64);
}

/// A compiled step takes a nest, and has a graph for each shape of it.
#[test]
fn compiled_steps_take_nested_inputs() {
    type Nest = (
        Vec<Tensor<3>>,
        Option<Tensor<1>>,
        HashMap<String, Tensor<1>>,
    );
    let init = |device: &Device| Net::new(Kind::LayerNorm, device);
    let loss = |model: &Net, (rows, scale, by_name): Nest| {
        let number = rows.len() as f64;
        let losses = rows.into_iter().map(|x| model.loss(x, By::Burn));
        let loss = losses.reduce(|sum, loss| sum + loss).expect("a row") / number;
        let loss = scale.map_or(loss.clone(), |scale| loss * scale);
        loss + by_name["a"].clone() - by_name["b"].clone()
    };
    let device = Device::flex();
    let mut step = compile(init, loss, sgd(), Mode::single()).expect("compiles");
    let one = |value: f32| Tensor::<1>::full([1], value, &device);
    let nest = |rows: usize, scale: Option<f32>| -> Nest {
        let rows = (0..rows).map(|row| batch(0, row, &device)).collect();
        let by_name = [("b".to_owned(), one(1.0)), ("a".to_owned(), one(4.0))];
        (rows, scale.map(one), by_name.into())
    };
    for (rows, scale) in [(1, None), (2, None), (2, Some(3.0)), (1, None)] {
        let plain = Net::new(Kind::LayerNorm, &device);
        let losses = (0..rows).map(|row| plain.loss(batch(0, row, &device), By::Burn));
        let losses = losses.map(|loss| loss.into_scalar::<f32>());
        let want = losses.sum::<f32>() / rows as f32 * scale.unwrap_or(1.0) + 3.0;
        let got = step.step(0.0, &nest(rows, scale)).expect("runs") as f32;
        assert!((got - want).abs() < 1e-4, "{rows} rows: {got}, not {want}");
    }
}

/// Checks that a loss and a forward to which these tensors are added are rejected, in both halves.
fn assert_lost(made: &[fn(&Device) -> Tensor<1>], lost: &str) {
    let lost = format!("{lost} would lose bits");
    for &made in made {
        for compute in HALVES {
            let init = |device: &Device| Net::new(Kind::Lstm, device);
            let scaling = (compute == FloatDType::F16).then(LossScaling::default);
            let options = || Options::default().precision(Precision::new(compute));
            let forward = move |model: &Net, x: Tensor<3>| {
                let y = model.forward(x.cast(compute), By::Burn);
                let made = made(&y.device());
                y + made.unsqueeze()
            };
            let loss =
                move |model: &Net, x: Tensor<3>| forward(model, x).cast(DType::F32).square().mean();
            let mode = Mode::single().options(options().scale_loss(scaling));
            let x = batch(0, 0, &Device::flex());
            let mut step = compile(init, loss, sgd(), mode).expect("compiles");
            let said = step.step(RATE, &x).expect_err("loses bits").to_string();
            assert!(said.contains(&lost), "{compute:?}: {said}");
            let plain = move |model: &Net, x: Tensor<3>| {
                let y = model.forward(x.cast(compute), By::Burn);
                y.cast(DType::F32).square().mean()
            };
            let mode = Mode::single().options(options().scale_loss(scaling));
            let mut step = compile(init, plain, sgd(), mode).expect("compiles");
            step.step(RATE, &x).expect("runs");
            let mut evaluation = Evaluation::new(init, forward);
            let said = step.evaluate(&mut evaluation, &x).expect_err("loses bits");
            assert!(said.to_string().contains(&lost), "{compute:?}: {said}");
        }
    }
}

/// Where new tensors would lose bits in the compute type, the error names the remedy.
#[test]
fn a_compiled_step_rejects_tensors_that_would_lose_bits() {
    let compute = FloatDType::BF16;
    let said = |loss: fn(&Net, (Tensor<3>, Tensor<3, Int>)) -> Tensor<1>| {
        let init = |device: &Device| Net::new(Kind::Lstm, device);
        let options = Options::default().precision(Precision::new(compute));
        let mut step =
            compile(init, loss, sgd(), Mode::single().options(options)).expect("compiles");
        let x = batch(0, 0, &Device::flex()).cast(compute);
        let targets = Tensor::<3, Int>::full([ROWS, 5, 3], 1001, &Device::flex());
        step.step(RATE, &(x, targets))
            .err()
            .map(|error| error.to_string())
    };
    let of_integers = said(|model, (x, targets)| {
        let y = model.forward(x, By::Burn);
        (y - targets.float()).cast(DType::F32).square().mean()
    });
    let of_integers = of_integers.expect("refused");
    assert!(
        of_integers.contains("integers would lose bits"),
        "{of_integers}"
    );
    let of_host = said(|model, (x, _)| {
        let y = model.forward(x, By::Burn);
        let weights = Tensor::<1>::from_floats([0.1, 0.2, 0.3], &y.device());
        (y * weights.unsqueeze()).cast(DType::F32).square().mean()
    });
    let of_host = of_host.expect("refused");
    assert!(
        of_host.contains("host numbers would lose bits"),
        "{of_host}"
    );
    // Numbers that halves cannot represent: 0.1 is not one of theirs, and neither are the others.
    let fills: [fn(&Device) -> Tensor<1>; 4] = [
        |device| Tensor::full([1], 0.1, device),
        |device| Tensor::full([1], 1e-9, device),
        |device| Tensor::full([3], -1e9, device),
        |device| Tensor::ones([1], device).full_like(65537.0),
    ];
    assert_lost(&fills, "host numbers");
    let draws: [fn(&Device) -> Tensor<1>; 2] = [
        |device| Tensor::random([3], Distribution::Default, device),
        |device| Tensor::random([1], Distribution::Normal(0.0, 1.0), device),
    ];
    assert_lost(&draws, "random numbers");
    let with_types = said(|model, (x, targets)| {
        let y = model.forward(x, By::Burn).cast(DType::F32);
        (y - targets.cast(FloatDType::F32)).square().mean()
    });
    assert_eq!(with_types, None);
}
