//! Mixed precision with placements, compared with Burn's loop on one rank, which casts a copy of its masters for each
//! forward.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Placement::Shard;
use burn_fsdp_mesh::{Clip, Mesh};
use burn_fsdp_spmd::graph::{CollectivePart, Payload};
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{DataParallel, Error, Evaluation, Expand, LossScaling, Mode};

use crate::clipping::sgd;
use crate::compiled::seeded;
use crate::eager::{elements, floats, scale};
use crate::models::{TokenBatch, tokens};
use crate::precision::{CASES, Case, Cast, Mean, Net, ROWS, Trained};

const STEPS: usize = 5;

const F16: Case = Case {
    compute: Some(FloatDType::F16),
    reduce: None,
    wide_norms: true,
};

/// The properties of a step.
#[derive(Debug, Clone, Copy)]
struct Step {
    case: Case,
    micro: usize,
    clip: Option<f64>,
    /// The loss is scaled: the first step overflows, and is skipped.
    is_scaled: bool,
}

const SCALING: LossScaling = LossScaling {
    initial_scale: 1e12,
    growth_factor: 2.0,
    backoff_factor: 1e-9,
    growth_interval: 100,
};

/// Returns the initial values of training, and the result of Burn's loop over the joined batch.
fn expected(step: Step) -> (Trained, Trained) {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Net::new(&device);
    let values = |model: &Net| {
        let values = floats(model).into_iter();
        let values = values.map(|(path, data)| (path, data.try_to_vec::<f32>().unwrap()));
        values.collect::<BTreeMap<_, _>>()
    };
    let first = values(&model);
    let mut optimizer = sgd().init();
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let mut loss = 0.0;
        let parts = (0..step.micro).map(|micro| {
            let cast = model.clone().map(&mut Cast(step.case, Vec::new()));
            let value = cast.loss(tokens(index, micro * ROWS, ROWS, &device));
            let value = value.cast(FloatDType::F32);
            loss += f64::from(value.clone().into_scalar::<f32>()) / step.micro as f64;
            // Gradients of 16 bits vanish if the loss is not scaled.
            let by = if step.is_scaled { 1e3 } else { 1.0 };
            let mut gradients = GradientsParams::from_grads((value * by).backward(), &model);
            scale(&model, &mut gradients, 1.0 / by);
            gradients
        });
        let parts: Vec<_> = parts.collect();
        let case = Case {
            reduce: Some(FloatDType::F32),
            ..step.case
        };
        let mut mean = Mean {
            case,
            path: Vec::new(),
            parts: &parts,
            mean: GradientsParams::new(),
        };
        model.visit(&mut mean);
        let mut mean = mean.mean;
        if let Some(limit) = step.clip {
            let squares = elements(&model, &mean).into_iter().map(|x| x * x);
            let norm = squares.sum::<f64>().sqrt();
            assert!(norm > limit, "step {index} is clipped: {norm}");
            scale(&model, &mut mean, limit / (norm + 1e-6));
        }
        losses.push(loss);
        // The step that overflows does not count.
        if !(step.is_scaled && index == 0) {
            model = optimizer.step(1e-2, model, mean);
        }
    }
    ((Vec::new(), first), (losses, values(&model)))
}

fn trained(
    num_ranks: usize,
    step: Step,
    mode: impl Fn(ProcessGroup) -> Result<(Mode, usize, usize), Error> + Send + Sync + 'static,
) -> (Trained, Vec<CollectivePart>) {
    Device::flex().seed(1);
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        // The number of parts of the batch, and this rank's part.
        let (mode, parts, own) = mode(world)?;
        let mode = mode.verified().certified();
        let mut compiled = compile(Net::new, Net::loss, sgd().build(), mode)?;
        let rows = ROWS / parts;
        let batch = |index, micro| tokens(index, micro * ROWS + own * rows, rows, &device);
        let mut losses = Vec::new();
        for index in 0..STEPS {
            let batches: Vec<_> = (0..step.micro).map(|micro| batch(index, micro)).collect();
            losses.push(compiled.step_accumulated(1e-2, &batches)?);
            assert_eq!(compiled.was_skipped(), step.is_scaled && index == 0);
            assert_eq!(
                compiled.grad_norm().is_some(),
                step.clip.is_some() && !compiled.was_skipped()
            );
        }
        let paths: Vec<_> = compiled
            .parameters()
            .iter()
            .map(|s| s.path.clone())
            .collect();
        let mut parameters = BTreeMap::new();
        for path in paths {
            let values = compiled.parameter(&path)?.try_to_vec::<f32>();
            parameters.insert(path.to_string(), values.expect("masters are of 32 bits"));
        }
        let mut evaluation = Evaluation::new(Net::new, |model: &Net, batch: TokenBatch| {
            model.loss(batch).cast(FloatDType::F32)
        });
        let measured: Tensor<1> = compiled.evaluate(&mut evaluation, &batch(50, 0))?;
        losses.push(f64::from(measured.into_scalar::<f32>()));
        let graph = compiled.graph().expect("it has run");
        let collectives = graph
            .nodes()
            .iter()
            .filter_map(|node| node.collective.clone());
        let reductions = collectives.filter(|of| {
            of.kind.contract().reduces && of.payload == Payload::Gradient && &*of.label != "loss"
        });
        let parts = reductions.flat_map(|of| of.parts).collect::<Vec<_>>();
        Ok(((losses, parameters), parts))
    };
    let mut results = launch(LaunchConfig::new(num_ranks), body).unwrap();
    for (other, _) in &results[1..] {
        assert_eq!(other, &results[0].0, "the ranks differ");
    }
    results.swap_remove(0)
}

/// Compares losses to three of the last bits of `bf16`, in which they are computed, and parameters to a share of the
/// change in training. A gradient that is counted twice, or not at all, differs by more.
fn assert_close(what: &str, got: &Trained, first: &Trained, want: &Trained) {
    for (step, (loss, wanted)) in got.0.iter().zip(&want.0).enumerate() {
        let differs = (loss - wanted).abs() > 3.0 / 128.0 * wanted;
        assert!(!differs, "{what}, step {step}: loss {loss}, not {wanted}");
    }
    assert_eq!(got.1.len(), want.1.len());
    for (path, values) in &got.1 {
        let (first, want) = (&first.1[path], &want.1[path]);
        let pairs = first.iter().zip(want);
        let moved = pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        for (value, wanted) in values.iter().zip(want) {
            assert!(
                (value - wanted).abs() <= 0.1 * moved,
                "{what}, {path}: {value}, not {wanted}; the largest change is {moved}"
            );
        }
    }
}

/// Returns the loss of a batch with the trained parameters, cast as the step casts them.
fn measured(case: Case, trained: &Trained) -> f64 {
    let device = Device::flex();
    let model = Net::new(&device);
    struct Set<'a>(&'a Trained, Vec<String>);
    impl burn::module::ModuleMapper for Set<'_> {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<D>>,
        ) -> burn::module::Param<Tensor<D>> {
            let values = self.0.1[&self.1.join(".")].clone();
            let data = burn::tensor::TensorData::new(values, param.val().dims());
            let device = param.val().device();
            burn::module::Param::initialized(param.id, Tensor::from_data(data, &device))
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.1.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.1.pop();
        }
    }
    let model = model.map(&mut Set(trained, Vec::new()));
    let model = model.map(&mut Cast(case, Vec::new()));
    let loss = model.loss(tokens(50, 0, ROWS, &device));
    f64::from(loss.cast(FloatDType::F32).into_scalar::<f32>())
}

fn check(
    what: &str,
    num_ranks: usize,
    step: Step,
    mode: impl Fn(ProcessGroup) -> Result<(Mode, usize, usize), Error> + Send + Sync + 'static,
) -> Vec<CollectivePart> {
    let (first, want) = expected(step);
    let (mut got, parts) = trained(num_ranks, step, mode);
    let evaluated = got.0.pop().expect("an evaluation");
    assert_close(what, &got, &first, &want);
    let loss = measured(step.case, &got);
    assert!(
        (evaluated - loss).abs() <= 3.0 / 128.0 * loss,
        "{what}: evaluates {evaluated}, not {loss}"
    );
    parts
}

fn options(step: Step) -> Options {
    let options = Options::default()
        .precision(step.case.precision())
        .clip_grad_norm(step.clip.map(Clip::to));
    options.scale_loss(step.is_scaled.then_some(SCALING))
}

fn on_a_mesh(
    (data, model): (usize, usize),
    options: Options,
) -> impl Fn(ProcessGroup) -> Result<(Mode, usize, usize), Error> {
    move |world| {
        let own = world.rank() / model;
        let mesh = Mesh::new([("data", data), ("model", model)])?;
        let mesh = ProcessMesh::new(&world, mesh).expect("as many ranks");
        let expand = Expand::new()
            .parameter("blocks.*.up.weight", "model", Shard(1))
            .parameter("blocks.*.up.bias", "model", Shard(0))
            .parameter("blocks.*.down.weight", "model", Shard(0))
            .input("**", "data", Shard(0));
        Ok((
            Mode::expand(mesh, expand).options(options.clone()),
            data,
            own,
        ))
    }
}

const PLAIN: Step = Step {
    case: F16,
    micro: 1,
    clip: None,
    is_scaled: false,
};

#[test]
fn tensor_parallel_halves_match_burn() {
    let _guard = seeded();
    for case in CASES {
        // 30 columns: four parts are unequal.
        for mesh in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4)] {
            let step = Step { case, ..PLAIN };
            let what = format!("{case:?} on {mesh:?}");
            let ranks = mesh.0 * mesh.1;
            let parts = check(&what, ranks, step, on_a_mesh(mesh, options(step)));
            if mesh != (2, 2) {
                continue;
            }
            // Values with an addend on every rank travel in the requested type, and arrive as wide as they are stored.
            assert!(!parts.is_empty(), "{what}");
            let halves = case.reduce != Some(FloatDType::F32);
            let travels = |part: &CollectivePart| {
                let is_norm =
                    part.path.contains("norm") && case.reduce.is_none() && case.wide_norms;
                if halves && !is_norm {
                    DType::BF16
                } else {
                    DType::F32
                }
            };
            for part in parts
                .iter()
                .filter(|part| part.dtype != part.result || !halves)
            {
                assert_eq!(
                    (part.dtype, part.result),
                    (travels(part), DType::F32),
                    "{what}"
                );
            }
            let narrow = parts.iter().filter(|part| part.dtype == DType::BF16);
            assert_eq!(narrow.count() > 0, halves, "{what}");
        }
    }
}

#[test]
fn automatic_placements_match_burn_in_half_precision() {
    let _guard = seeded();
    for case in [CASES[0], CASES[2]] {
        for ranks in 1..=4 {
            let step = Step { case, ..PLAIN };
            let options = options(step);
            let mode = move |world: ProcessGroup| {
                let (size, rank) = (world.size(), world.rank());
                let mode = Mode::data_parallel(world, DataParallel::Automatic);
                Ok((mode.options(options.clone()), size, rank))
            };
            check(&format!("{case:?} on {ranks}"), ranks, step, mode);
        }
    }
}

#[test]
fn scaled_clipped_and_accumulated_halves_match_burn() {
    let _guard = seeded();
    for (case, is_scaled) in [(CASES[1], false), (F16, true)] {
        for (micro, clip) in [(1, None), (2, None), (1, Some(0.05)), (3, Some(0.05))] {
            let step = Step {
                case,
                micro,
                clip,
                is_scaled,
            };
            for mesh in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)] {
                let what = format!("{step:?} on {mesh:?}");
                check(&what, mesh.0 * mesh.1, step, on_a_mesh(mesh, options(step)));
            }
            let options = options(step);
            let mode = move |world: ProcessGroup| {
                let (size, rank) = (world.size(), world.rank());
                let mode = Mode::data_parallel(world, DataParallel::Automatic);
                Ok((mode.options(options.clone()), size, rank))
            };
            check(&format!("{step:?}, automatic"), 2, step, mode);
        }
    }
}
