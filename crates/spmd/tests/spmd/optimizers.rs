//! Optimizers under the compiler: the bits of Burn's loop, or an error that names the part that cannot be followed.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::{Device, Distribution, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, ProcessMesh, launch};
use burn_fsdp_mesh::{Mesh, Placement::Shard};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{
    CompiledStep, DataParallel, Error, Expand, Mode, OptimizerState, Strategy, compile,
};

use crate::compiled::seeded;
use crate::eager::{self, Trained};
use crate::every::{ForEach, InF32, Kept, Needs, for_each};

/// Number of steps, enough to show a schedule, branches and bias correction.
const STEPS: usize = 20;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

impl Net {
    fn of(device: &Device, bias: bool) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).with_bias(bias).init(device);
        Self {
            a: layer(5, 3),
            b: layer(3, 7),
        }
    }

    fn new(device: &Device) -> Self {
        Self::of(device, true)
    }

    fn matrices(device: &Device) -> Self {
        Self::of(device, false)
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.b.forward(self.a.forward(x).tanh());
        y.sub_scalar(0.3).square().mean()
    }
}

fn data<const D: usize>(seed: usize, shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let value = |i: usize| ((i * 37 + seed * 101 + 13) % 211) as f32 / 105.0 - 1.0;
    let values: Vec<f32> = (0..len).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn batch(step: usize, device: &Device) -> Tensor<2> {
    data(step, [4, 5], device)
}

type Init = fn(&Device) -> Net;

fn init_for(needs: Needs) -> Init {
    match needs {
        Needs::Matrix => Net::matrices,
        _ => Net::new,
    }
}

/// A rate that is constant, falls, or begins at zero.
type Rate = fn(usize) -> f64;

const RATES: [(&str, Rate); 3] = [
    ("constant", |_| 1.0),
    ("falling", |step| 1.0 / (1.0 + 0.3 * step as f64)),
    ("from zero", |step| step as f64 / 10.0),
];

fn compiled(
    init: Init,
    optimizer: impl Optimizer,
    mode: Mode,
) -> Result<CompiledStep<Tensor<2>>, Error> {
    compile(init, |net: &Net, x| net.loss(x), optimizer, mode)
}

fn expected(init: Init, optimizer: impl Optimizer, rate: impl Fn(usize) -> f64) -> Trained {
    let optimizer = ModuleOptimizer::from(optimizer);
    eager::train(
        init,
        |net: &Net, x| net.loss(x),
        batch,
        STEPS,
        rate,
        optimizer,
    )
}

/// Checks that parameters are as expected, to the bit.
fn assert_same(what: &str, step: &mut CompiledStep<Tensor<2>>, expected: &Trained) {
    for (path, expected) in &expected.parameters {
        let got = step.parameter(path).unwrap();
        assert_eq!(got.as_bytes(), expected.as_bytes(), "{what}: {path}");
    }
}

struct OneRank(Vec<String>);

impl ForEach for OneRank {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, base: f64, needs: Needs) {
        for (schedule, rate) in RATES {
            let rate = |step: usize| base * rate(step);
            let init = init_for(needs);
            let expected = expected(init, optimizer.clone(), rate);
            let device = Device::flex();
            device.seed(1);
            let mode = Mode::single().verified();
            let run = || -> Result<(CompiledStep<Tensor<2>>, Vec<f32>), Error> {
                let mut step = compiled(init, optimizer.clone(), mode.clone())?;
                let losses = (0..STEPS).map(|index| {
                    let loss = step.step(rate(index), &batch(index, &device))?;
                    Ok(loss as f32)
                });
                let losses = losses.collect::<Result<Vec<_>, Error>>()?;
                Ok((step, losses))
            };
            let what = format!("{name}, {schedule}");
            match run() {
                Ok((mut step, losses)) if losses == expected.losses => {
                    assert_same(&what, &mut step, &expected);
                }
                Ok((_, losses)) => {
                    let at = losses
                        .iter()
                        .zip(&expected.losses)
                        .position(|(a, b)| a != b);
                    self.0.push(format!("{what}: another loss at step {at:?}"));
                }
                Err(error) => self.0.push(format!("{what}: {error}")),
            }
        }
    }
}

#[test]
fn every_optimizer_trains_bit_for_bit_as_burn_does() {
    let _guard = seeded();
    let mut one = OneRank(Vec::new());
    for_each(&mut one);
    assert!(one.0.is_empty(), "{:#?}", one.0);
}

/// Trains on several ranks with each style: close to Burn on one rank, or refused by name.
struct Ranks(Vec<String>);

impl ForEach for Ranks {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, base: f64, needs: Needs) {
        let rate = move |step: usize| base / (1.0 + 0.3 * step as f64);
        let init = init_for(needs);
        let expected = expected(init, optimizer.clone(), rate);
        let styles = [
            Strategy::NoShard.into(),
            Strategy::FullShard.into(),
            DataParallel::Automatic,
        ];
        for style in styles {
            Device::flex().seed(1);
            let optimizer = optimizer.clone();
            let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
                let device = Device::flex();
                let mode = Mode::data_parallel(world.clone(), style).verified();
                let mut step = compiled(init, optimizer.clone(), mode)?;
                let part = |index| batch(index, &device).narrow(0, 2 * world.rank(), 2);
                (0..STEPS)
                    .map(|index| step.step(rate(index), &part(index)))
                    .collect()
            };
            let what = format!("{name}, {style:?}");
            let is_refused = style == Strategy::FullShard.into()
                && matches!(needs, Needs::Whole | Needs::Matrix);
            match launch(LaunchConfig::new(2), body).map(|mut losses| losses.swap_remove(0)) {
                Ok(_) if is_refused => self.0.push(format!("{what} is not refused")),
                Ok(losses) => {
                    let far = losses
                        .iter()
                        .zip(&expected.losses)
                        .position(|(a, b)| (a - f64::from(*b)).abs() > 2e-5 * f64::from(*b).abs());
                    if let Some(at) = far {
                        self.0.push(format!("{what}: another loss at step {at}"));
                    }
                }
                Err(error) => {
                    let error = error.to_string();
                    let names_way_out = error.contains("Strategy::NoShard");
                    if !(is_refused && names_way_out) {
                        self.0.push(format!("{what}: {error}"));
                    }
                }
            }
        }
    }
}

#[test]
fn every_optimizer_trains_on_two_ranks_or_is_rejected_with_a_remedy() {
    let _guard = seeded();
    let mut ranks = Ranks(Vec::new());
    for_each(&mut ranks);
    assert!(ranks.0.is_empty(), "{:#?}", ranks.0);
}

/// Resumes a run in another step, from everything that can be read from the first.
struct Resumed(Vec<String>);

impl ForEach for Resumed {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, base: f64, needs: Needs) {
        let rate = |step: usize| base / (1.0 + 0.3 * step as f64);
        let init = init_for(needs);
        let device = Device::flex();
        // In the middle of a period of 5, before and after a branch at 6.
        for cut in [1, 3, 7] {
            device.seed(1);
            let mut first = compiled(init, optimizer.clone(), Mode::single()).unwrap();
            for index in 0..cut {
                first.step(rate(index), &batch(index, &device)).unwrap();
            }
            let mut second = compiled(init, optimizer.clone(), Mode::single()).unwrap();
            let mut states = Vec::new();
            for spec in first.parameters().to_vec() {
                let path = spec.path.to_string();
                second
                    .set_parameter(&path, first.parameter(&path).unwrap())
                    .unwrap();
                let counters = first.counters(&path).map(<[_]>::to_vec);
                states.extend(counters.map(|counters| OptimizerState {
                    tensors: first.state_shards(&path).unwrap(),
                    path,
                    counters,
                }));
            }
            if let Err(error) = second.resume_with(cut as u64, states) {
                self.0.push(format!("{name}, from step {cut}: {error}"));
                continue;
            }
            for index in cut..cut + 6 {
                let batch = batch(index, &device);
                let expected = first.step(rate(index), &batch).unwrap();
                let got = second.step(rate(index), &batch);
                if got.as_ref().ok() != Some(&expected) {
                    let what = format!("{name}, from step {cut}, step {index}");
                    self.0.push(format!("{what}: {got:?} is not {expected}"));
                    break;
                }
            }
        }
    }
}

#[test]
fn every_optimizer_resumes_from_its_extracted_state() {
    let _guard = seeded();
    let mut resumed = Resumed(Vec::new());
    for_each(&mut resumed);
    assert!(resumed.0.is_empty(), "{:#?}", resumed.0);
}

struct To(FloatDType);

impl ModuleMapper for To {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let value = param.val();
        let is_tracked = value.device().is_autodiff();
        let value = value.detach().cast(self.0).detach();
        let value = if is_tracked {
            value.require_grad()
        } else {
            value
        };
        Param::initialized(id, value)
    }
}

fn typed_loss(net: &Net, x: Tensor<2>) -> Tensor<1> {
    let dtype = FloatDType::from(net.a.weight.dtype());
    let y = net.b.forward(net.a.forward(x.cast(dtype)).tanh());
    y.cast(FloatDType::F32).sub_scalar(0.3).square().mean()
}

fn same_in_type<O: Optimizer>(init: Init, optimizer: O, base: f64) {
    let rate = |step: usize| base / (1.0 + 0.3 * step as f64);
    let oracle = ModuleOptimizer::from(optimizer.clone());
    let expected = eager::train(init, typed_loss, batch, STEPS, rate, oracle);
    let device = Device::flex();
    device.seed(1);
    let mut step = compile(init, typed_loss, optimizer, Mode::single().verified()).unwrap();
    for (index, expected) in expected.losses.iter().enumerate() {
        let loss = step.step(rate(index), &batch(index, &device)).unwrap();
        assert_eq!(loss as f32, *expected, "step {index}");
    }
    assert_same("typed", &mut step, &expected);
}

#[test]
fn an_optimizer_may_look_at_the_type_of_a_parameter() {
    let _guard = seeded();
    let halves: Init = |device| Net::new(device).map(&mut To(FloatDType::BF16));
    let doubles: Init = |device| Net::new(device).map(&mut To(FloatDType::F64));
    same_in_type(halves, InF32, 1.0);
    same_in_type(halves, AdamWConfig::new().build(), 0.1);
    same_in_type(doubles, InF32, 1.0);
    same_in_type(doubles, AdamWConfig::new().build(), 0.1);
}

/// A middle layer that only long batches use.
#[derive(Module, Debug)]
struct Branchy {
    a: Linear,
    b: Linear,
    c: Linear,
}

impl Branchy {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(4, 4).with_bias(false).init(device);
        Self {
            a: layer(),
            b: layer(),
            c: layer(),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let is_long = x.dims()[0] > 4;
        let mut y = self.a.forward(x).tanh();
        if is_long {
            y = self.b.forward(y).tanh();
        }
        self.c.forward(y).sub_scalar(0.3).square().mean()
    }
}

/// The steps with a long batch: only at first, only later, now and then.
const LONG: [fn(usize) -> bool; 3] = [|step| step < 2, |step| step > 3, |step| step % 3 == 1];

fn branchy_batch(is_long: bool, step: usize, device: &Device) -> Tensor<2> {
    let rows = if is_long { 6 } else { 4 };
    data(step, [rows, 4], device)
}

fn branches<O: Optimizer>(optimizer: O, rate: f64) {
    for is_long in LONG {
        let batch = move |step, device: &Device| branchy_batch(is_long(step), step, device);
        let oracle = ModuleOptimizer::from(optimizer.clone());
        let expected = eager::train(Branchy::new, Branchy::loss, batch, 9, |_| rate, oracle);
        let device = Device::flex();
        device.seed(1);
        let mode = Mode::single().verified();
        let mut step = compile(Branchy::new, Branchy::loss, optimizer.clone(), mode).unwrap();
        for (index, expected) in expected.losses.iter().enumerate() {
            let loss = step.step(rate, &batch(index, &device)).unwrap();
            assert_eq!(loss as f32, *expected, "step {index}");
        }
        assert_same("branches", &mut step, &expected);
        for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
            device.seed(1);
            let optimizer = optimizer.clone();
            let body = move |world: ProcessGroup| -> Result<Vec<f64>, Error> {
                let device = Device::flex();
                let mut options = Options::default();
                options.optimizer = place;
                let mode = Mode::data_parallel(world, Strategy::FullShard);
                let mode = mode.options(options).verified();
                let mut step = compile(Branchy::new, Branchy::loss, optimizer.clone(), mode)?;
                (0..9)
                    .map(|index| step.step(rate, &batch(index, &device)))
                    .collect()
            };
            let losses = launch(LaunchConfig::new(2), body).unwrap().swap_remove(0);
            for (index, (loss, expected)) in losses.iter().zip(&expected.losses).enumerate() {
                let difference = (loss - f64::from(*expected)).abs() / f64::from(*expected);
                assert!(
                    difference < 1e-5,
                    "{place:?}, step {index}: {loss} is not {expected}"
                );
            }
        }
    }
}

#[test]
fn parameters_that_some_batches_do_not_train_keep_their_own_states_and_steps() {
    let _guard = seeded();
    branches(AdamWConfig::new().build(), 1e-2);
    let momentum = MomentumConfig::new().with_dampening(0.0);
    branches(SgdConfig::new().with_momentum(Some(momentum)).build(), 1e-1);
}

#[test]
fn steps_are_counted_per_parameter() {
    let _guard = seeded();
    let device = Device::flex();
    let optimizer = AdamWConfig::new().build();
    let mut step = compile(Branchy::new, Branchy::loss, optimizer, Mode::single()).unwrap();
    for index in 0..5 {
        let batch = branchy_batch(index > 2, index, &device);
        step.step(1e-2, &batch).unwrap();
        let names = step.states("b.weight").unwrap().len();
        assert_eq!(names, if index > 2 { 2 } else { 0 }, "step {index}");
    }
    let time = |path: &str| format!("{:?}", step.counters(path).unwrap());
    assert_ne!(time("a.weight"), time("b.weight"));
    assert_eq!(time("a.weight"), time("c.weight"));
}

optimizer!(
    /// Never the same operations twice.
    Changing,
    |rate, tensor, gradient, before| {
        let time = before.as_ref().map_or(0, |kept| kept.time) + 1;
        let mut delta = gradient.mul_scalar(rate);
        for _ in 0..time {
            delta = delta.tanh();
        }
        let next = Kept {
            time,
            ..Kept::default()
        };
        (tensor - delta, Some(next))
    }
);

optimizer!(
    /// One more tensor in every step.
    Growing,
    |rate, tensor, gradient, before| {
        let mut next = before.unwrap_or_default();
        next.tensors.push(gradient.clone());
        (tensor - gradient.mul_scalar(rate), Some(next))
    }
);

optimizer!(
    /// Reads a tensor.
    Reading,
    |rate, tensor, gradient, before| {
        let norm = gradient.clone().square().sum().into_scalar::<f32>();
        let delta = gradient.mul_scalar(rate / f64::from(norm).max(1.0));
        (tensor - delta, before)
    }
);

optimizer!(
    /// Makes a tensor from host data.
    HostData,
    |rate, tensor, gradient, before| {
        let scale = Tensor::<1>::from_floats([rate as f32], &tensor.device());
        (tensor - gradient.mul(scale.unsqueeze()), before)
    }
);

optimizer!(
    /// Adds noise.
    Noisy,
    |rate, tensor, gradient, before| {
        let noise = gradient.random_like(Distribution::Normal(0.0, 1.0));
        (tensor - (gradient + noise).mul_scalar(rate), before)
    }
);

#[test]
fn noise_of_an_optimizer_is_refused_on_several_ranks() {
    let _guard = seeded();
    let run = |world: ProcessGroup| -> Result<f64, Error> {
        let mode = Mode::data_parallel(world, Strategy::NoShard);
        compiled(Net::new, Noisy, mode)?.step(0.1, &batch(0, &Device::flex()))
    };
    launch(LaunchConfig::new(1), run).unwrap();
    let error = launch(LaunchConfig::new(2), run).unwrap_err().to_string();
    assert!(
        error.contains("Noisy") && error.contains("Random"),
        "{error}"
    );
}

fn refusal(optimizer: impl Optimizer, steps: usize) -> String {
    let device = Device::flex();
    let run = || -> Result<(), Error> {
        let mut step = compiled(Net::new, optimizer, Mode::single())?;
        for index in 0..steps {
            step.step(0.1, &batch(index, &device))?;
        }
        Ok(())
    };
    let error = run().unwrap_err();
    assert!(
        matches!(error, Error::UntraceableOptimizer { .. }),
        "{error}"
    );
    error.to_string()
}

#[test]
fn unsupported_optimizers_are_named_in_the_error() {
    let _guard = seeded();
    for (error, parts) in [
        (
            refusal(Changing, 40),
            ["Changing", "a.bias", "keep changing"],
        ),
        (refusal(Growing, 10), ["Growing", "a.bias", "tensor3"]),
        (
            refusal(Reading, 1),
            ["Reading", "a.weight", "no concrete value"],
        ),
        (refusal(HostData, 1), ["HostData", "a.bias", "host data"]),
        (
            refusal(burn::optim::MuonConfig::new().build(), 1),
            ["Muon", "a.bias", "2D"],
        ),
    ] {
        for part in parts {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
}

/// If a matrix has as many rows as there are ranks, a shard has the shape of Adafactor's moments by column, which are
/// whole.
#[test]
fn whole_states_with_the_shape_of_a_shard_stay_whole() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<(), Error> {
        let device = Device::flex();
        let step = || {
            let mesh = Mesh::line("model", 3).expect("three ranks");
            let mesh = ProcessMesh::new(&world, mesh).expect("three ranks");
            let expand = Expand::new().parameter("b.weight", "model", Shard(0));
            let mode = Mode::expand(mesh, expand);
            compiled(Net::new, AdafactorConfig::new().build(), mode)
        };
        let (mut first, mut second) = (step()?, step()?);
        for index in 0..2 {
            first.step(0.1, &batch(index, &device))?;
        }
        for spec in first.parameters().to_vec() {
            second.set_parameter(&spec.path, first.parameter(&spec.path)?)?;
            for (slot, state) in first.states(&spec.path)? {
                let (shape, _) = first.state_place(&spec.path, &slot)?;
                assert_eq!(state.shape().to_vec(), shape, "{} {slot}", spec.path);
                second.set_state(&spec.path, &slot, state)?;
            }
        }
        second.resume(2, 0.1)?;
        for index in 2..5 {
            let batch = batch(index, &device);
            assert_eq!(first.step(0.1, &batch)?, second.step(0.1, &batch)?);
        }
        assert_eq!(first.parameter("b.weight")?, second.parameter("b.weight")?);
        Ok(())
    };
    launch(LaunchConfig::new(3), body).unwrap();
}

#[test]
fn states_that_are_not_the_optimizers_are_refused_and_change_nothing() {
    let device = Device::flex();
    let sgd = || {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .build()
    };
    let _guard = seeded();
    device.seed(1);
    let mut first = compiled(Net::new, sgd(), Mode::single()).unwrap();
    for index in 0..3 {
        first.step(0.1, &batch(index, &device)).unwrap();
    }
    let state = |tensors: Vec<(&str, TensorData)>, counters: Vec<(String, burn_pack::Scalar)>| {
        let tensors = tensors.into_iter();
        vec![OptimizerState {
            path: "a.weight".to_owned(),
            counters,
            tensors: tensors
                .map(|(name, data)| (name.to_owned(), data))
                .collect(),
        }]
    };
    let zeros = |shape: [usize; 2]| TensorData::zeros::<f32, _>(shape);
    let time = vec![("time".to_owned(), burn_pack::Scalar::UInt(3))];
    for (wrong, part) in [
        (state(vec![("moment", zeros([5, 3]))], Vec::new()), "moment"),
        (
            state(vec![("momentum.velocity", zeros([3, 5]))], Vec::new()),
            "[5, 3]",
        ),
        (
            state(vec![("momentum.velocity", zeros([5, 3]))], time),
            "time",
        ),
    ] {
        let error = first.resume_with(9, wrong).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(first.num_steps(), 3);
    device.seed(1);
    let mut second = compiled(Net::new, sgd(), Mode::single()).unwrap();
    for index in 0..6 {
        let loss = second.step(0.1, &batch(index, &device)).unwrap();
        if index > 2 {
            assert_eq!(first.step(0.1, &batch(index, &device)).unwrap(), loss);
        }
    }
    // A state without its host part.
    let mut third = compiled(Net::new, sgd(), Mode::single()).unwrap();
    third
        .set_state("a.weight", "momentum.velocity", zeros([5, 3]))
        .unwrap();
    let error = third.step(0.1, &batch(0, &device)).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
}
