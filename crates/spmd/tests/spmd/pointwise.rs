//! Chains of pointwise operations as one operation, with the same bits and fewer passes over memory.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, Optimizer, SgdConfig};
use burn::tensor::activation::{relu, sigmoid, silu, tanh};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Clip;
use burn_fsdp_spmd::graph::Graph;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::compiled::seeded;
use crate::eager;

const STEPS: usize = 6;
const ROWS: usize = 12;
const DIM: usize = 7;

/// Gates, norms, powers, broadcasts of rows, columns and single numbers, and values that are read twice.
#[derive(Module, Debug)]
struct Gates {
    up: Linear,
    gate: SwiGlu,
    norm: RmsNorm,
    scale: Param<Tensor<1>>,
    down: Linear,
}

impl Gates {
    fn new(device: &Device) -> Self {
        Self {
            up: LinearConfig::new(DIM, 2 * DIM).init(device),
            gate: SwiGluConfig::new(2 * DIM, 3 * DIM)
                .with_bias(true)
                .init(device),
            norm: RmsNormConfig::new(3 * DIM).init(device),
            scale: Param::from_tensor(Tensor::from_floats([0.7], device)),
            down: LinearConfig::new(3 * DIM, DIM).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let up = silu(self.up.forward(x.clone())) + relu(self.up.forward(-x.clone())) * 0.5;
        let gated = self.norm.forward(self.gate.forward(up));
        // A column next to the rows.
        let strength = gated
            .clone()
            .powf_scalar(2.0)
            .mean_dim(1)
            .sqrt()
            .add_scalar(0.1);
        let scaled = gated / strength * sigmoid(self.scale.val().unsqueeze::<2>());
        let curved = tanh(scaled.clone()) - scaled.powf_scalar(3.0).mul_scalar(1e-3);
        let y = self.down.forward(curved) + x.clone();
        let error = (y - x.abs().add_scalar(1.0).recip().log().exp()).powf_scalar(-2.0);
        (error.add_scalar(1.0).recip()).mean()
    }
}

fn part(step: usize, first: usize, rows: usize, device: &Device) -> Tensor<2> {
    let values: Vec<f32> = (first * DIM..(first + rows) * DIM)
        .map(|index| ((index * 37 + step * 11) % 89) as f32 / 44.0 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, [rows, DIM]), device)
}

/// The results of training, with the names of the nodes of its graph.
struct Trained {
    losses: Vec<f64>,
    parameters: BTreeMap<String, Vec<f32>>,
    names: BTreeMap<String, usize>,
}

fn train(num_ranks: usize, strategy: Strategy, options: &Options) -> Trained {
    let _guard = seeded();
    Device::flex().seed(1);
    let options = options.clone();
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let (rank, rows) = (world.rank(), ROWS / world.size());
        let mode = Mode::data_parallel(world, strategy).options(options.clone());
        let optimizer = AdamWConfig::new().with_weight_decay(0.05).build();
        let mut step = compile(Gates::new, Gates::loss, optimizer, mode.verified())?;
        let mut losses = Vec::new();
        for index in 0..STEPS {
            let rate = 1e-2 / (index + 1) as f64;
            losses.push(step.step(rate, &part(index, rank * rows, rows, &device))?);
        }
        let names = count(step.graph().expect("it has run"));
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let mut parameters = BTreeMap::new();
        for path in paths {
            let values = step.parameter(&path)?.try_to_vec().expect("f32 values");
            parameters.insert(path.to_string(), values);
        }
        Ok(Trained {
            losses,
            parameters,
            names,
        })
    };
    let mut ranks = launch(LaunchConfig::new(num_ranks), body).unwrap();
    ranks.swap_remove(0)
}

fn count(graph: &Graph) -> BTreeMap<String, usize> {
    let mut names = BTreeMap::new();
    for node in graph.nodes().iter().filter(|node| !node.is_drop()) {
        *names
            .entry(format!("{} {}", node.phase, node.name()))
            .or_default() += 1;
    }
    names
}

const FUSED: &str = "Custom.models.pointwise";

#[test]
fn one_rank_matches_burn_bit_for_bit() {
    let _guard = seeded();
    Device::flex().seed(1);
    let batch = |step: usize, device: &Device| part(step, 0, ROWS, device);
    let optimizer = AdamWConfig::new().with_weight_decay(0.05);
    let rate = |index: usize| 1e-2 / (index + 1) as f64;
    let expected = eager::train(
        Gates::new,
        Gates::loss,
        batch,
        STEPS,
        rate,
        optimizer.init(),
    );
    drop(_guard);
    for place in [
        OptimizerPlace::AtEnd,
        OptimizerPlace::InBackward,
        OptimizerPlace::InNextForward,
    ] {
        let options = Options::default().kernels(false).optimizer(place);
        let found = train(1, Strategy::NoShard, &options);
        let losses: Vec<f32> = found.losses.iter().map(|loss| *loss as f32).collect();
        assert_eq!(losses, expected.losses, "{place:?}");
        for (path, values) in &found.parameters {
            let expected = expected.parameters[path].try_to_vec::<f32>().unwrap();
            assert_eq!(*values, expected, "{place:?}, {path}");
        }
    }
}

#[test]
fn fused_steps_match_plain_ones_bit_for_bit() {
    for (num_ranks, strategy, options) in [
        (1, Strategy::NoShard, Options::none()),
        (2, Strategy::FullShard, Options::default()),
        (3, Strategy::NoShard, Options::default().kernels(false)),
        (
            2,
            Strategy::FullShard,
            Options::default().clip_grad_norm(Clip::to(0.01)),
        ),
        (
            4,
            Strategy::FullShard,
            Options::default().recompute_units(["gate"]),
        ),
        (
            3,
            Strategy::ShardGradOp,
            Options::default()
                .optimizer(OptimizerPlace::InNextForward)
                .prefetch(true),
        ),
    ] {
        let plain = train(num_ranks, strategy, &options.clone().fuse(false));
        let fused = train(num_ranks, strategy, &options.clone().fuse(true));
        let what = format!("{options:?} on {num_ranks}");
        assert_eq!(fused.losses, plain.losses, "{what}");
        assert_eq!(fused.parameters, plain.parameters, "{what}");
        let num_fused = |of: &Trained, phase: &str| {
            let name = format!("{phase} {FUSED}");
            of.names.get(&name).copied().unwrap_or(0)
        };
        for phase in ["forward", "backward", "optimizer"] {
            assert_eq!(num_fused(&plain, phase), 0, "{what}");
            assert!(num_fused(&fused, phase) > 0, "{what}: {:#?}", fused.names);
        }
        let total = |of: &Trained| of.names.values().sum::<usize>();
        assert!(
            2 * total(&fused) < total(&plain),
            "{what}: {:#?}",
            fused.names
        );
    }
}

/// Returns the nodes of the second step, and the number of parameters.
fn graph_of(optimizer: impl Optimizer) -> (BTreeMap<String, usize>, usize) {
    let _guard = seeded();
    let mode = Mode::data_parallel(ProcessGroup::solo(), Strategy::NoShard);
    let mut step = compile(Gates::new, Gates::loss, optimizer, mode).unwrap();
    for index in 0..2 {
        let batch = part(index, 0, ROWS, &Device::flex());
        step.step(1e-2, &batch).unwrap();
    }
    let graph = step.graph().expect("it has run");
    (count(graph), graph.parameters().len())
}

/// For AdamW, the two moments and the parameter remain. For momentum, the momentum and the parameter remain.
#[test]
fn an_optimizer_is_one_operation_for_each_result() {
    let adam = graph_of(AdamWConfig::new().build());
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.1);
    let sgd = graph_of(SgdConfig::new().with_momentum(Some(momentum)).build());
    for ((names, num_parameters), results) in [(adam, 3), (sgd, 2)] {
        let is_optimizer = |(name, _): &(&String, &usize)| name.starts_with("optimizer");
        let of_optimizer: BTreeMap<_, _> = names.iter().filter(is_optimizer).collect();
        let name = format!("optimizer {FUSED}");
        let expected = BTreeMap::from([(&name, &names[&name])]);
        assert_eq!(of_optimizer, expected);
        assert_eq!(names[&name], results * num_parameters);
    }
}

/// Numbers that look random, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % limit as u64) as usize
    }
}

/// Values whose parameters are read as rows, columns and single numbers.
#[derive(Module, Debug)]
struct Values {
    square: Param<Tensor<2>>,
    row: Param<Tensor<1>>,
    one: Param<Tensor<1>>,
}

impl Values {
    fn new(device: &Device) -> Self {
        let values = |len: usize, shift: usize| {
            let values = (0..len).map(|index| ((index * 37 + shift) % 89) as f32 / 88.0 - 0.5);
            Tensor::<1>::from_floats(values.collect::<Vec<_>>().as_slice(), device)
        };
        Self {
            square: Param::from_tensor(values(DIM * DIM, 3).reshape([DIM, DIM])),
            row: Param::from_tensor(values(DIM, 5)),
            one: Param::from_tensor(values(1, 60)),
        }
    }

    /// Returns a loss of operations that a seed chooses, on values that it also chooses.
    fn loss(&self, x: Tensor<2>, seed: u64) -> Tensor<1> {
        let mut numbers = Numbers(seed * 0x9E37_79B9_7F4A_7C15);
        let product = x.clone().matmul(self.square.val());
        let mut whole = vec![x, product + self.row.val().unsqueeze::<2>()];
        let mut small = vec![self.row.val().unsqueeze(), self.one.val().unsqueeze()];
        for _ in 0..4 + numbers.below(14) {
            let a = whole[numbers.below(whole.len())].clone();
            let b = match numbers.below(3) {
                0 => small[numbers.below(small.len())].clone(),
                _ => whole[numbers.below(whole.len())].clone(),
            };
            let away_from_zero = |value: Tensor<2>| value.abs() + 0.5;
            let value = match numbers.below(18) {
                0 => a + b,
                1 => a - b,
                2 => a * b,
                3 => a / away_from_zero(b),
                4 => sigmoid(a),
                5 => relu(a),
                6 => silu(a),
                7 => away_from_zero(a).sqrt(),
                8 => away_from_zero(a).recip(),
                9 => tanh(a).exp(),
                10 => away_from_zero(a).log(),
                11 => {
                    let exponents = [-2.0, -1.0, 0.0, 0.5, 1.0, 1.7, 2.0, 3.0];
                    let exponent = exponents[numbers.below(exponents.len())];
                    away_from_zero(a).powf_scalar(exponent)
                }
                12 => -a * 0.3 + 0.1,
                13 => a / 3.0 - 0.2,
                14 => a.matmul(self.square.val()),
                15 => a.clone().mask_fill(a.greater_elem(0.2), 0.1),
                16 => a.swap_dims(0, 1).exp().swap_dims(0, 1).tanh() * b,
                _ => a.clone() * a.clone() - a,
            };
            let value = tanh(value * 0.5) * 2.0;
            match numbers.below(6) {
                0 => small.push(value.clone().mean_dim(1)),
                1 => small.push(value.clone().sum_dim(0) * 0.1),
                _ => {}
            }
            whole.push(value);
        }
        let last = whole.pop().expect("there are values");
        let other = whole[numbers.below(whole.len())].clone();
        let used = self.square.val().abs().mean() + self.row.val().abs().mean();
        last.powf_scalar(2.0).mean() + other.abs().mean() * 0.1 + used * 0.01
    }
}

#[test]
fn random_losses_match_burn_bit_for_bit() {
    let mut num_fused = 0;
    for seed in 1..=60 {
        let _guard = seeded();
        let loss = move |model: &Values, x: Tensor<2>| model.loss(x, seed);
        let batch = |step: usize, device: &Device| part(step, 0, ROWS, device);
        let optimizer = AdamWConfig::new().with_weight_decay(0.05);
        let rate = |index: usize| 1e-2 / (index + 1) as f64;
        let expected = eager::train(Values::new, loss, batch, STEPS, rate, optimizer.init());
        let places = [
            OptimizerPlace::AtEnd,
            OptimizerPlace::InBackward,
            OptimizerPlace::InNextForward,
        ];
        let options = Options::default().kernels(false);
        let mut options = options.optimizer(places[seed as usize % 3]);
        if seed % 2 == 0 {
            options = options.recompute(None);
        }
        let mode = Mode::data_parallel(ProcessGroup::solo(), Strategy::FullShard);
        let mode = mode.options(options).verified();
        let mut step = compile(Values::new, loss, optimizer.build(), mode).unwrap();
        for (index, expected) in expected.losses.iter().enumerate() {
            let batch = part(index, 0, ROWS, &Device::flex());
            let found = step.step(rate(index), &batch).unwrap() as f32;
            assert_eq!(found, *expected, "seed {seed}, step {index}");
        }
        for (path, expected) in &expected.parameters {
            let found = step.parameter(path).unwrap().try_to_vec::<f32>().unwrap();
            let expected = expected.try_to_vec::<f32>().unwrap();
            assert_eq!(found, expected, "seed {seed}, {path}");
        }
        let names = count(step.graph().expect("it has run"));
        num_fused += names
            .iter()
            .filter(|(name, _)| name.ends_with(FUSED))
            .count();
    }
    assert!(num_fused >= 100, "{num_fused}");
}
