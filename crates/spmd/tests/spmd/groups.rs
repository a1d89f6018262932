//! Groups of parameters with their own optimizers, decays and rates: the bits of Burn's loop with the same groups.

use std::collections::BTreeMap;

use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{
    ModuleLearningRate, ModuleLrScheduler, ModuleLrSchedulerConfig,
};
use burn::module::{Module, ParamGroup, ParamId};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LionConfig,
    ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{
    CompiledStep, DataParallel, Error, Mode, OptimizerGroups, OptimizerState, Strategy, compile,
};

use crate::compiled::seeded;
use crate::eager::{Trained, floats};

const STEPS: usize = 6;

/// Parameters of one shape in several groups: `a.bias`, `norm.gamma` and `norm.beta` have the same shape.
#[derive(Module, Debug)]
struct Net {
    a: Linear,
    norm: LayerNorm,
    b: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            a: LinearConfig::new(5, 3).init(device),
            norm: LayerNormConfig::new(3).init(device),
            b: LinearConfig::new(3, 7).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.norm.forward(self.a.forward(x).tanh());
        self.b.forward(y).sub_scalar(0.3).square().mean()
    }
}

/// Returns the same batch on every rank, so the mean over ranks equals one rank's result.
fn batch(step: usize, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 37 + step * 101 + 13) % 211) as f32 / 105.0 - 1.0;
    let values: Vec<f32> = (0..20).map(value).collect();
    Tensor::from_data(TensorData::new(values, [4, 5]), device)
}

fn adamw(decay: f32) -> AdamWConfig {
    AdamWConfig::new()
        .with_weight_decay(decay)
        .with_epsilon(1e-3)
}

fn sgd() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new()))
}

/// Returns groups of every kind, by paths of every kind.
fn all_groups() -> Vec<(&'static str, OptimizerGroups)> {
    let vectors = || ParamGroup::from_any_predicates(vec!["bias", "gamma", "beta"]);
    let decay = || Some(WeightDecayConfig::new(0.5));
    let of = |optimizer: AdamWConfig| OptimizerGroups::from(optimizer.build());
    vec![
        (
            "no decay of vectors",
            of(adamw(3.0)).with_group(vectors(), adamw(0.0).build()),
        ),
        (
            "another optimizer for norms",
            of(adamw(0.1)).with_group(ParamGroup::from_predicate("norm"), sgd().build()),
        ),
        (
            "the last of several groups",
            OptimizerGroups::from(AdamConfig::new().build())
                .with_group(vectors(), LionConfig::new().build())
                .with_group(
                    ParamGroup::from_predicate("a."),
                    RmsPropConfig::new().build(),
                ),
        ),
        (
            "a group by a pattern",
            OptimizerGroups::from(AdaGradConfig::new().build()).with_group(
                ParamGroup::from_regex("^b\\.w").unwrap(),
                AdanConfig::new().build(),
            ),
        ),
        (
            "all but one",
            OptimizerGroups::from(sgd().with_weight_decay(decay()).build()).with_group(
                ParamGroup::all().exclude(ParamGroup::from_path("a.weight")),
                adamw(0.2).with_amsgrad(true).build(),
            ),
        ),
        (
            "a group that covers all",
            OptimizerGroups::from(SgdConfig::new().build())
                .with_group(ParamGroup::all(), adamw(1.0).build()),
        ),
        (
            "states of other shapes and none",
            OptimizerGroups::from(SgdConfig::new().build()).with_group(
                ParamGroup::from_paths(vec!["a.bias", "norm.beta"]),
                adamw(0.5).with_cautious_weight_decay(true).build(),
            ),
        ),
        ("one group", of(adamw(0.3))),
    ]
}

type Schedules = fn() -> ModuleLrScheduler;

/// One rate, a schedule for each group, and a group whose rate begins at zero, where optimizers omit operations.
const RATES: [(&str, Schedules); 3] = [
    ("one rate", || ModuleLrScheduler::new(0.02)),
    ("a schedule for each", || {
        let falling = LinearLrSchedulerConfig::new(0.05, 0.001, 4);
        let slow = ExponentialLrSchedulerConfig::new(0.01, 0.5);
        let all = ModuleLrSchedulerConfig::new(falling.into());
        let all = all.with_group(ParamGroup::from_predicate("norm"), slow);
        let all = all.init().unwrap();
        all.with_group(ParamGroup::from_path("b.weight"), 0.03)
    }),
    ("from zero", || {
        let rising = LinearLrSchedulerConfig::new(1e-9, 0.04, 4);
        let all = ModuleLrSchedulerConfig::new(LinearLrSchedulerConfig::new(0.02, 0.01, 3).into());
        let all = all.with_group(ParamGroup::from_predicate("a.w"), rising);
        let all = all.init().unwrap();
        all.with_group(ParamGroup::from_predicate("bias"), 0.0)
    }),
];

/// Runs Burn's own loop.
fn expected(groups: OptimizerGroups, mut rates: ModuleLrScheduler) -> Trained {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut net = Net::new(&device);
    let _ = floats(&net);
    let mut optimizer = ModuleOptimizer::from(groups);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = net.loss(batch(step, &device));
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(rates.step(), net, gradients);
    }
    Trained {
        losses,
        parameters: floats(&net),
    }
}

type Step = CompiledStep<Tensor<2>>;

fn compiled(groups: OptimizerGroups, mode: Mode) -> Result<Step, Error> {
    compile(Net::new, |net: &Net, x| net.loss(x), groups, mode)
}

/// Returns losses and parameters of a compiled run; `micro` above one runs the same batch that many times.
fn run(
    groups: OptimizerGroups,
    mut rates: ModuleLrScheduler,
    mode: Mode,
    micro: usize,
) -> Result<Trained, Error> {
    let mut step = compiled(groups, mode.verified())?;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let batches = vec![batch(index, &Device::flex()); micro];
        losses.push(step.step_accumulated(rates.step(), &batches)? as f32);
    }
    let paths = step.parameters().iter().map(|spec| spec.path.to_string());
    let paths: Vec<_> = paths.collect();
    let parameters = paths.into_iter().map(|path| {
        let parameter = step.parameter(&path)?;
        Ok((path, parameter))
    });
    Ok(Trained {
        losses,
        parameters: parameters.collect::<Result<BTreeMap<_, _>, Error>>()?,
    })
}

/// Returns the first value that differs, depending on whether sums of equal addends are exact.
fn difference(got: &Trained, expected: &Trained, is_exact: bool) -> Option<String> {
    let is_far = |a: f32, b: f32| {
        if is_exact {
            a.to_bits() != b.to_bits()
        } else {
            (a - b).abs() > 1e-5 * (1.0 + b.abs())
        }
    };
    let mut losses = got.losses.iter().zip(&expected.losses);
    if let Some(step) = losses.position(|(a, b)| is_far(*a, *b)) {
        return Some(format!("another loss at step {step}"));
    }
    assert_eq!(got.parameters.len(), expected.parameters.len());
    let mut parameters = expected.parameters.iter();
    let other = parameters.find(|(path, expected)| {
        let got = got.parameters[*path].iter::<f32>();
        got.zip(expected.iter::<f32>()).any(|(a, b)| is_far(a, b))
    });
    other.map(|(path, _)| format!("another {path}"))
}

/// Returns options without kernels, whose sums have a different order than in Burn's layer norm.
fn plain() -> Options {
    Options::default().kernels(false)
}

fn divided(world: &ProcessGroup, style: impl Into<DataParallel>) -> Mode {
    Mode::data_parallel(world.clone(), style).options(plain())
}

/// A way to divide a step: its mode, and its micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    By(Strategy),
    PutOff,
    CopiesAndMicroBatches,
    Placed,
}

impl Way {
    fn mode(self, world: &ProcessGroup) -> Result<Mode, Error> {
        Ok(match self {
            Self::By(strategy) => divided(world, strategy),
            Self::PutOff => {
                let mut options = plain();
                options.optimizer = OptimizerPlace::InNextForward;
                divided(world, Strategy::FullShard).options(options)
            }
            Self::CopiesAndMicroBatches => {
                let mesh = Mesh::new([("replicate", 2), ("shard", 2)])?;
                let mesh = ProcessMesh::new(world, mesh);
                let mesh = mesh.map_err(|error| Error::Internal(error.to_string()))?;
                Mode::hybrid(mesh, "replicate", Strategy::FullShard)?.options(plain())
            }
            Self::Placed => divided(world, DataParallel::Automatic),
        })
    }

    fn micro(self) -> usize {
        match self {
            Self::CopiesAndMicroBatches => 2,
            _ => 1,
        }
    }
}

/// The ways, each with a number of ranks.
const WAYS: [(Way, usize); 9] = [
    (Way::By(Strategy::FullShard), 1),
    (Way::By(Strategy::FullShard), 2),
    (Way::By(Strategy::FullShard), 3),
    (Way::By(Strategy::FullShard), 4),
    (Way::By(Strategy::NoShard), 2),
    (Way::By(Strategy::ShardGradOp), 4),
    (Way::PutOff, 2),
    (Way::CopiesAndMicroBatches, 4),
    (Way::Placed, 2),
];

#[test]
fn groups_match_burns_groups_bit_for_bit() {
    let _guard = seeded();
    let mut failed = Vec::new();
    let mut runs = Vec::new();
    for (name, groups) in all_groups() {
        for (schedule, rates) in RATES {
            let expected = expected(groups.clone(), rates());
            Device::flex().seed(1);
            let got = run(groups.clone(), rates(), Mode::single().options(plain()), 1).unwrap();
            if let Some(difference) = difference(&got, &expected, true) {
                failed.push(format!("{name}, {schedule}, one rank: {difference}"));
            }
            for (way, ranks) in WAYS {
                Device::flex().seed(1);
                let groups = groups.clone();
                let by_rank = launch(LaunchConfig::new(ranks), move |world: ProcessGroup| {
                    run(groups.clone(), rates(), way.mode(&world)?, way.micro())
                });
                let what = format!("{name}, {schedule}, {way:?}, {ranks} ranks");
                // A third is not exact in floats, and placements sum in a different order.
                let is_exact = ranks != 3 && way != Way::Placed;
                match by_rank {
                    Err(error) => failed.push(format!("{what}: {error}")),
                    Ok(by_rank) => failed.extend(by_rank.iter().find_map(|got| {
                        let difference = difference(got, &expected, is_exact)?;
                        Some(format!("{what}: {difference}"))
                    })),
                }
            }
            runs.push(expected);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    // Every setting trains differently, so none can pass for another.
    for (index, run) in runs.iter().enumerate() {
        let mut others = runs[..index].iter();
        let same = others.position(|other| other.parameters == run.parameters);
        assert_eq!(same, None, "setting {index} trains as another");
    }
}

#[test]
fn groups_resume_from_their_extracted_state() {
    let _guard = seeded();
    for (name, groups) in all_groups() {
        for (schedule, scheduler) in RATES {
            let mut rates = scheduler();
            let rates: Vec<ModuleLearningRate> = (0..STEPS).map(|_| rates.step()).collect();
            Device::flex().seed(1);
            let mut first = compiled(groups.clone(), Mode::single()).unwrap();
            for (index, rate) in rates.iter().enumerate().take(3) {
                first
                    .step(rate.clone(), &batch(index, &Device::flex()))
                    .unwrap();
            }
            let mut second = compiled(groups.clone(), Mode::single()).unwrap();
            let mut states = Vec::new();
            for spec in first.parameters().to_vec() {
                let path = spec.path.to_string();
                let whole = first.parameter(&path).unwrap();
                second.set_parameter(&path, whole).unwrap();
                let counters = first.counters(&path).map(<[_]>::to_vec);
                states.extend(counters.map(|counters| OptimizerState {
                    tensors: first.state_shards(&path).unwrap(),
                    path,
                    counters,
                }));
            }
            second.resume_with(3, states).unwrap();
            for (index, rate) in rates.iter().enumerate().skip(3) {
                let batch = batch(index, &Device::flex());
                let expected = first.step(rate.clone(), &batch).unwrap();
                let got = second.step(rate.clone(), &batch).unwrap();
                assert_eq!(got, expected, "{name}, {schedule}, step {index}");
            }
        }
    }
}

#[test]
fn a_group_without_any_parameter_is_refused() {
    let _guard = seeded();
    let all = || OptimizerGroups::from(adamw(0.1).build());
    let nowhere = all().with_group(ParamGroup::from_predicate("nowhere"), adamw(0.0).build());
    let error = compiled(nowhere, Mode::single()).unwrap_err().to_string();
    assert!(
        error.contains("nowhere") && error.contains("a.weight"),
        "{error}"
    );
    // A newly made module has other ids.
    let other = Net::new(&Device::flex());
    let by_id = all().with_group(
        ParamGroup::from_ids(vec![other.a.bias.as_ref().unwrap().id]),
        adamw(0.0).build(),
    );
    assert!(matches!(
        compiled(by_id, Mode::single()),
        Err(Error::UnknownName { .. })
    ));
}

/// Returns a module with the same id every time.
fn with_id(device: &Device) -> Net {
    let mut net = Net::new(device);
    net.a.weight.id = ParamId::from(7);
    net
}

#[test]
fn groups_by_ids_refer_to_the_module_that_init_returns() {
    let _guard = seeded();
    let all = || OptimizerGroups::from(adamw(0.1).build());
    let ids = ParamGroup::from_ids(vec![ParamId::from(7)]);
    let groups = all().with_group(ids, adamw(9.0).build());
    let losses_of = |groups: OptimizerGroups| -> Vec<f32> {
        let device = Device::flex().autodiff();
        device.seed(1);
        let mut net = with_id(&device);
        let _ = floats(&net);
        let mut optimizer = ModuleOptimizer::from(groups);
        let steps = (0..STEPS).map(|step| {
            let loss = net.loss(batch(step, &device));
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(0.02, net.clone(), gradients);
            loss.into_scalar::<f32>()
        });
        steps.collect()
    };
    let expected = losses_of(groups.clone());
    assert_ne!(expected, losses_of(all()));
    Device::flex().seed(1);
    let mode = Mode::single().options(plain());
    let mut step = compile(with_id, |net: &Net, x| net.loss(x), groups, mode).unwrap();
    for (index, expected) in expected.iter().enumerate() {
        let loss = step.step(0.02, &batch(index, &Device::flex())).unwrap();
        assert_eq!(loss as f32, *expected, "step {index}");
    }
}

#[test]
fn group_rates_that_differ_between_ranks_are_found_before_anything_runs() {
    let _guard = seeded();
    Device::flex().seed(1);
    let body = |world: ProcessGroup| -> Result<(f64, Error), Error> {
        let groups = OptimizerGroups::from(SgdConfig::new().build());
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mut step = compiled(groups, mode)?;
        let of_rank = 0.01 * (1 + world.rank()) as f64;
        let mut other =
            ModuleLrScheduler::new(0.02).with_group(ParamGroup::from_path("a.bias"), of_rank);
        let batch = batch(0, &Device::flex());
        let error = step.step(other.step(), &batch).unwrap_err();
        // Nothing has changed.
        Ok((step.step(0.02, &batch)?, error))
    };
    for (loss, error) in launch(LaunchConfig::new(2), body).unwrap() {
        assert!(matches!(error, Error::GraphsDiffer { .. }), "{error}");
        assert!(error.to_string().contains("rates of groups"), "{error}");
        assert!(loss.is_finite());
    }
}

#[test]
fn a_step_without_any_rate_is_refused() {
    let _guard = seeded();
    Device::flex().seed(1);
    let mut step = compiled(OptimizerGroups::from(adamw(0.1).build()), Mode::single()).unwrap();
    let batch = batch(0, &Device::flex());
    let error = step
        .step(ModuleLearningRate::default(), &batch)
        .unwrap_err();
    assert!(error.to_string().contains("learning rate"), "{error}");
    assert!(step.step(0.1, &batch).is_ok());
}
