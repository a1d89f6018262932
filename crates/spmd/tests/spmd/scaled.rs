//! Steps whose loss is scaled, compared with Burn's loop on one rank.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Clip, Mesh};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Error, LossScalerState, LossScaling, Mode, ScaleError, Strategy};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager::{adamw, floats};
use crate::models::{Encoder, sequences, tokens};
use crate::precision::{Case, Cast, Mean, Net, ROWS, Trained, assert_close};

const STEPS: usize = 10;

const HALF: Case = Case {
    compute: Some(FloatDType::F16),
    reduce: None,
    wide_norms: true,
};

/// Scaling whose first steps overflow, and whose scale grows soon.
const SCALING: LossScaling = LossScaling {
    initial_scale: 16_777_216.0,
    growth_factor: 2.0,
    backoff_factor: 0.25,
    growth_interval: 3,
};

/// The results of a run, and for each step the scale before it, and whether it was skipped.
type Run = (Trained, Vec<(f64, bool)>);

/// Divides gradients by the scale, and checks that all are finite.
struct Unscale {
    inverse: f64,
    given: GradientsParams,
    scaled: GradientsParams,
    is_finite: bool,
}

impl ModuleVisitor for Unscale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.given.remove::<D>(param.id) {
            let values: Vec<f32> = gradient.to_data().try_to_vec().unwrap();
            self.is_finite &= values.iter().all(|value| value.is_finite());
            self.scaled
                .register(param.id, gradient.mul_scalar(self.inverse));
        }
    }
}

/// Runs Burn's loop over the parts of each batch.
fn expected(case: Case, parts: usize, mut optimizer: ModuleOptimizer) -> Run {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Net::new(&device);
    let _ = floats(&model);
    let rows = ROWS / parts;
    let (mut losses, mut scales) = (Vec::new(), Vec::new());
    let mut state = SCALING.begin();
    for step in 0..STEPS {
        let mut loss = 0.0;
        let gradients: Vec<_> = (0..parts)
            .map(|part| {
                let cast = model.clone().map(&mut Cast(case, Vec::new()));
                let value = cast.loss(tokens(step, part * rows, rows, &device));
                let value = value.cast(FloatDType::F32);
                loss += f64::from(value.clone().into_scalar::<f32>()) / parts as f64;
                let scaled = value.mul_scalar(state.scale);
                GradientsParams::from_grads(scaled.backward(), &model)
            })
            .collect();
        let mut mean = Mean {
            case,
            path: Vec::new(),
            parts: &gradients,
            mean: GradientsParams::new(),
        };
        model.visit(&mut mean);
        let mut unscale = Unscale {
            inverse: state.scale.recip(),
            given: mean.mean,
            scaled: GradientsParams::new(),
            is_finite: true,
        };
        model.visit(&mut unscale);
        losses.push(loss);
        scales.push((state.scale, !unscale.is_finite));
        if unscale.is_finite {
            model = optimizer.step(1e-2, model, unscale.scaled);
            state = SCALING.grow(state);
        } else {
            state = SCALING.back_off(state).unwrap()
        }
    }
    let parameters = floats(&model).into_iter();
    let parameters = parameters.map(|(path, data)| (path, data.try_to_vec().unwrap()));
    ((losses, parameters.collect()), scales)
}

fn trained(
    num_ranks: usize,
    mode: impl Fn(ProcessGroup) -> Result<Mode, Error> + Send + Sync + 'static,
    has_moments: bool,
) -> Run {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<Run, Error> {
        let device = Device::flex();
        let (rank, rows) = (world.rank(), ROWS / world.size());
        let mode = mode(world)?.verified();
        let mut step = if has_moments {
            compile(Net::new, Net::loss, adamw().build(), mode)?
        } else {
            compile(Net::new, Net::loss, sgd().build(), mode)?
        };
        let (mut losses, mut scales) = (Vec::new(), Vec::new());
        for index in 0..STEPS {
            let scale = step.loss_scale().expect("it scales").scale;
            losses.push(step.step(1e-2, &tokens(index, rank * rows, rows, &device))?);
            scales.push((scale, step.was_skipped()));
        }
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let mut parameters = BTreeMap::new();
        for path in paths {
            let values = step.parameter(&path)?.try_to_vec::<f32>();
            parameters.insert(path.to_string(), values.expect("masters are of 32 bits"));
        }
        Ok(((losses, parameters), scales))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for other in &results[1..] {
        assert_eq!(other, &results[0], "the ranks differ");
    }
    results.swap_remove(0)
}

fn options(case: Case) -> Options {
    let options = Options::default().precision(case.precision());
    options.kernels(false).scale_loss(SCALING)
}

#[test]
fn halves_with_a_scaled_loss_match_burn() {
    let _guard = seeded();
    let narrow = Case {
        wide_norms: false,
        ..HALF
    };
    let reduced_wide = Case {
        reduce: Some(FloatDType::F32),
        ..HALF
    };
    let travels_half = Case {
        compute: None,
        reduce: Some(FloatDType::F16),
        wide_norms: false,
    };
    let full = Case {
        compute: None,
        reduce: None,
        wide_norms: false,
    };
    for case in [HALF, narrow, reduced_wide, travels_half, full] {
        for ranks in 1..=4 {
            let (want, scales) = expected(case, ranks, sgd().init());
            let num_skipped = scales.iter().filter(|(_, is_skipped)| *is_skipped).count();
            let is_half = case != full;
            assert_eq!(is_half, num_skipped > 0, "{case:?}: {scales:?}");
            assert!(num_skipped < STEPS - 3, "{case:?}: {scales:?}");
            for strategy in [Strategy::FullShard, Strategy::NoShard] {
                let mode =
                    move |world| Ok(Mode::data_parallel(world, strategy).options(options(case)));
                let (got, of_ranks) = trained(ranks, mode, false);
                let what = format!("{case:?}, {strategy} on {ranks}");
                assert_eq!(of_ranks, scales, "{what}");
                assert_close(&what, &got, &want);
            }
        }
    }
}

#[test]
fn skipped_steps_do_not_reach_the_optimizer() {
    let _guard = seeded();
    let (want, scales) = expected(HALF, 2, adamw().init());
    assert!(scales[0].1, "the first step is skipped: {scales:?}");
    let wanted = [
        options(HALF),
        options(HALF).optimizer(OptimizerPlace::AtEnd),
        options(HALF).optimizer(OptimizerPlace::InNextForward),
        options(HALF).kernels(true),
        Options::none()
            .precision(HALF.precision())
            .scale_loss(SCALING),
    ];
    for options in wanted {
        let what = format!("{options:?}");
        let mode = move |world| {
            let mode = Mode::data_parallel(world, Strategy::FullShard);
            Ok(mode.options(options.clone()).certified())
        };
        let (got, of_ranks) = trained(2, mode, true);
        assert_eq!(of_ranks, scales, "{what}");
        assert_close(&what, &got, &want);
    }
    let (want, scales) = expected(HALF, 4, adamw().init());
    let mode = |world: ProcessGroup| {
        let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
        let mesh = ProcessMesh::new(&world, mesh).expect("four ranks");
        let mode = Mode::hybrid(mesh, "replicate", Strategy::FullShard)?;
        Ok(mode.options(options(HALF)))
    };
    let (got, of_ranks) = trained(4, mode, true);
    assert_eq!(of_ranks, scales, "hybrid");
    assert_close("hybrid", &got, &want);
}

/// Makes one rank's loss not a number in the third step.
fn broken(
    model: &Net,
    (tokens, targets, by): (Tensor<2, Int>, Tensor<2, Int>, Tensor<1>),
) -> Tensor<1> {
    model.loss((tokens, targets)).cast(FloatDType::F32) * by
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    let _guard = seeded();
    let run = |breaks: bool, micro: usize| {
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            let device = Device::flex();
            let scaling = LossScaling {
                initial_scale: 1024.0,
                growth_interval: 100,
                ..SCALING
            };
            let options = Options::default().precision(HALF.precision());
            let options = options.scale_loss(scaling).clip_grad_norm(Clip::to(0.05));
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
            let mode = mode.options(options).verified();
            let mut step = compile(Net::new, broken, adamw().build(), mode)?;
            let mut seen = Vec::new();
            for index in 0..6 {
                // Without a fault, the step that would be skipped is omitted.
                if index == 2 && !breaks {
                    continue;
                }
                let is_broken = index == 2 && world.rank() == 1;
                let batches: Vec<_> = (0..micro)
                    .map(|of| {
                        let first = (world.rank() * micro + of) * 2;
                        let (tokens, targets) = tokens(index, first, 2, &device);
                        let is_broken = is_broken && of + 1 == micro;
                        let by = if is_broken { f32::INFINITY } else { 1.0 };
                        (tokens, targets, Tensor::from_floats([by], &device))
                    })
                    .collect();
                let loss = step.step_accumulated(1e-2, &batches)?;
                assert_eq!(step.was_skipped(), index == 2);
                assert_eq!(step.grad_norm().is_some(), index != 2);
                let scale = step.loss_scale().unwrap().scale;
                assert_eq!(scale, if index >= 2 && breaks { 256.0 } else { 1024.0 });
                if index != 2 {
                    seen.push(loss);
                }
            }
            assert_eq!(step.num_steps(), if breaks { 6 } else { 5 });
            let weight = step.parameter("blocks.1.up.weight")?;
            Ok((seen, weight.try_to_vec::<f32>().unwrap()))
        };
        Device::flex().seed(1);
        launch(LaunchConfig::new(2), body).unwrap()
    };
    for micro in [1, 3] {
        let (broken, whole) = (run(true, micro), run(false, micro));
        for (broken, whole) in broken.iter().zip(&whole) {
            for (got, want) in broken.0.iter().zip(&whole.0) {
                assert!(
                    (got - want).abs() <= 2e-3 * want.abs(),
                    "{got} is not {want}"
                );
            }
            for (got, want) in broken.1.iter().zip(&whole.1) {
                assert!((got - want).abs() <= 1e-3, "{got} is not {want}");
            }
        }
    }
}

#[test]
fn the_scale_is_resumed_and_must_agree_between_ranks() {
    let _guard = seeded();
    let device = Device::flex();
    let mode = || Mode::single().options(options(HALF));
    let mut step = compile(Net::new, Net::loss, sgd().build(), mode()).unwrap();
    let state = LossScalerState {
        scale: 512.0,
        growth_tracker: 2,
    };
    step.set_loss_scale(state).unwrap();
    step.step(1e-2, &tokens(0, 0, ROWS, &device)).unwrap();
    assert!(!step.was_skipped());
    let grown = step.loss_scale().unwrap();
    assert_eq!((grown.scale, grown.growth_tracker), (1024.0, 0));
    let zero = LossScalerState {
        scale: 0.0,
        ..state
    };
    let error = step.set_loss_scale(zero).unwrap_err().to_string();
    assert!(error.contains("normal in 32 bits"), "{error}");

    let mut plain = compile(Net::new, Net::loss, sgd().build(), Mode::single()).unwrap();
    assert_eq!(plain.loss_scale(), None);
    let error = plain.set_loss_scale(state).unwrap_err();
    assert!(
        matches!(error, Error::LossScale(ScaleError::Off)),
        "{error}"
    );

    let errors = launch(LaunchConfig::new(2), move |world: ProcessGroup| {
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compile(
            Net::new,
            Net::loss,
            sgd().build(),
            mode.options(options(HALF)),
        )?;
        if world.rank() == 1 {
            step.set_loss_scale(state)?;
        }
        Ok::<_, Error>(
            step.step(1e-2, &tokens(0, 0, 3, &Device::flex()))
                .unwrap_err(),
        )
    });
    for error in errors.unwrap() {
        assert!(matches!(error, Error::GraphsDiffer { .. }), "{error}");
    }
}

#[test]
fn unsupported_loss_scaling_is_rejected() {
    let _guard = seeded();
    let compiled = |mode: Mode| {
        let step = compile(Net::new, Net::loss, sgd().build(), mode);
        step.map(|_| ()).unwrap_err().to_string()
    };
    let wrong = LossScaling {
        backoff_factor: 2.0,
        ..SCALING
    };
    let said = compiled(Mode::single().options(Options::default().scale_loss(wrong)));
    assert!(
        said.contains("backoff_factor is 2.0") && said.contains("between 0 and 1"),
        "{said}"
    );

    // Infinities at every scale.
    let scaling = LossScaling {
        initial_scale: 1e-30,
        backoff_factor: 1e-6,
        ..SCALING
    };
    let mode = Mode::single().options(Options::default().scale_loss(scaling));
    let mut step = compile(Net::new, broken, sgd().build(), mode).unwrap();
    let device = Device::flex();
    let (inputs, targets) = tokens(0, 0, 3, &device);
    let batch = (
        inputs,
        targets,
        Tensor::from_floats([f32::INFINITY], &device),
    );
    step.step(1e-2, &batch).unwrap();
    let before = step.parameter("head.weight").unwrap();
    for done in [2, 3] {
        let error = step.step(1e-2, &batch).unwrap_err();
        let has_vanished = matches!(error, Error::LossScale(ScaleError::Vanished { .. }));
        assert!(has_vanished && step.was_skipped(), "{error}");
        assert_eq!(step.num_steps(), done);
    }
    assert_eq!(step.parameter("head.weight").unwrap(), before);
    let (inputs, targets, _) = batch;
    let right = (inputs, targets, Tensor::ones([1], &device));
    step.step(1e-2, &right).unwrap();
    assert!(!step.was_skipped());
    assert!(step.parameter("head.weight").unwrap() != before);
}

/// Dropout, and a 64-bit model, together with the factor of the loss.
#[test]
fn a_scale_that_is_a_power_of_two_changes_nothing_else() {
    let _guard = seeded();
    let run = |scaling: Option<LossScaling>, is_seeded: bool| {
        let device = Device::flex();
        device.seed(1);
        let options = Options::default().scale_loss(scaling);
        let mode = Mode::single().options(options);
        let mode = if is_seeded { mode.seeded(5) } else { mode };
        let mut step = compile(Encoder::new, Encoder::loss, adamw().build(), mode).unwrap();
        let mut losses = Vec::new();
        for index in 0..4 {
            device.seed(index);
            let batch = sequences(index as usize, 8, &device);
            losses.push(step.step_accumulated(1e-2, &[batch]).unwrap());
        }
        losses
    };
    for is_seeded in [true, false] {
        let (scaled, plain) = (
            run(Some(LossScaling::default()), is_seeded),
            run(None, is_seeded),
        );
        for (got, want) in scaled.iter().zip(&plain) {
            assert!(
                (got - want).abs() <= 1e-6 * want.abs(),
                "{got} is not {want}"
            );
        }
    }
    let double = |model: &Linear, x: Tensor<2>| model.forward(x).square().mean();
    let init = |device: &Device| {
        let weight = Tensor::full([3, 2], 0.3, (device, DType::F64));
        Linear {
            weight: Param::from_tensor(weight),
            bias: None,
        }
    };
    let train = |scaling: Option<LossScaling>| {
        Device::flex().seed(3);
        let options = Options::default().scale_loss(scaling);
        let mut step =
            compile(init, double, sgd().build(), Mode::single().options(options)).unwrap();
        let x = Tensor::<2>::ones([4, 3], &Device::flex()).cast(FloatDType::F64);
        for _ in 0..3 {
            step.step(1e-2, &x).unwrap();
        }
        step.parameter("weight")
            .unwrap()
            .try_to_vec::<f64>()
            .unwrap()
    };
    for (got, want) in train(Some(LossScaling::default())).iter().zip(train(None)) {
        assert!((got - want).abs() <= 1e-14, "{got} is not {want}");
    }
}
