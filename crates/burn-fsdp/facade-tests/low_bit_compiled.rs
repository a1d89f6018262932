//! Optimizer states in fewer bits in compiled steps: bit for bit those of plain Burn on one rank.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{
    AdamW, AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, RecordState, Sgd, SgdConfig,
    StateSink, StateSource, momentum::MomentumConfig,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{
    CompiledStep, Evaluation, Expand, Mode, Options, compile, restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::checkpoint::{GroupRendezvous, SaveRequest, TrainingState, save_step};
use burn_fsdp::internals::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::optim::{LowBitOptimizer, StateFormat};
use burn_fsdp::plan::MemoryPlan;
use burn_fsdp::sharding::Cut;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch,
};

use crate::fixed::Fixed;

const FORMATS: [StateFormat; 2] = [StateFormat::Bf16, StateFormat::Block8];
const RATE: f64 = 1e-2;

/// Parameters of less than a block and of several blocks and a part, and vectors.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    head: Linear,
}

/// Number of elements of all parameters.
const LEN: usize = 9 * 37 + 37 + 37 * 41 + 41 + 41 * 3;

impl Net {
    fn drawn(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(9, 37).init(device),
            second: LinearConfig::new(37, 41).init(device),
            head: LinearConfig::new(41, 3).with_bias(false).init(device),
        }
    }

    fn new(device: &Device) -> Self {
        Self::drawn(device).map(&mut Fixed(0))
    }

    /// The sum of the parameters, each times a number of `x`: the gradients are `x`, on any number of ranks.
    fn loss(&self, x: Tensor<1>) -> Tensor<1> {
        let biases = [&self.first.bias, &self.second.bias];
        let biases = biases.into_iter().flatten().map(Param::val);
        let weights = [&self.first, &self.second, &self.head];
        let weights = weights.map(|layer| layer.weight.val().flatten(0, 1));
        let mut start = 0;
        let terms = weights.into_iter().chain(biases).map(|value: Tensor<1>| {
            let [len] = value.dims();
            start += len;
            (value * x.clone().narrow(0, start - len, len)).sum()
        });
        terms.reduce(|sum, term| sum + term).expect("terms")
    }
}

/// Gradients of all sizes, including zero, whose multiples by small numbers are exact.
fn gradients(step: u64, device: &Device) -> Tensor<1> {
    let value = |i: u64| {
        let number = (i * 2_654_435_761 + step * 40_503) >> 4;
        let size = [0, -3, -10, -20, -40, -80, 0][(number / 3 % 7) as usize];
        let zero = if number % 7 == 6 { 0.0 } else { 1.0 };
        zero * ((number % 1023) as f32 - 511.0) / 512.0 * 2f32.powi(size)
    };
    let values: Vec<f32> = (0..LEN as u64).map(value).collect();
    Tensor::from_data(TensorData::new(values, [LEN]), device)
}

/// Bits of the parameters by path.
type Params = BTreeMap<String, Vec<u32>>;

fn bits(data: &TensorData) -> Vec<u32> {
    data.iter::<f32>().map(f32::to_bits).collect()
}

/// Trains with plain Burn on one rank.
fn plain<O: Optimizer>(optimizer: &O, format: StateFormat, steps: u64) -> Params {
    let device = Device::flex().autodiff();
    let mut net = Net::new(&device);
    let optimizer = LowBitOptimizer::new(optimizer.clone(), format);
    let mut optimizer = ModuleOptimizer::from(optimizer);
    for step in 0..steps {
        let loss = net.loss(gradients(step, &device));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(RATE, net, gradients);
    }
    let mut params = Params::new();
    for (name, layer) in [
        ("first", net.first),
        ("second", net.second),
        ("head", net.head),
    ] {
        let weight = layer.weight.val().into_data();
        params.insert(format!("{name}.weight"), bits(&weight));
        if let Some(bias) = layer.bias {
            params.insert(format!("{name}.bias"), bits(&bias.val().into_data()));
        }
    }
    params
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Engine {
    /// The eager engine.
    Eager,
    Compiled(Strategy),
    /// Compiled, with whole parameters on one rank each.
    Owners,
    /// Compiled, with two copies of the shards.
    Hybrid,
}

const FULL: Engine = Engine::Compiled(Strategy::FullShard);

fn mode(engine: Engine, world: &ProcessGroup) -> Result<Mode, Error> {
    let full = |world: &ProcessGroup| Mode::data_parallel(world.clone(), Strategy::FullShard);
    Ok(match engine {
        Engine::Compiled(strategy) => Mode::data_parallel(world.clone(), strategy),
        Engine::Hybrid => {
            let mesh = Mesh::new([("copies", 2), ("shard", world.size() / 2)])?;
            let mesh = ProcessMesh::new(world, mesh)?;
            Mode::hybrid(mesh, "copies", Strategy::FullShard)?
        }
        Engine::Owners => full(world).one_owner(["**"]),
        Engine::Eager => full(world),
    })
}

fn step_of<O: Optimizer>(
    optimizer: &O,
    format: StateFormat,
    mode: Mode,
) -> Result<CompiledStep<Tensor<1>>, Error> {
    let optimizer = LowBitOptimizer::new(optimizer.clone(), format);
    let loss = |net: &Net, x: Tensor<1>| net.loss(x);
    Ok(compile(Net::new, loss, optimizer, mode.verified())?)
}

/// The whole parameters. All ranks must call it.
fn whole(step: &mut CompiledStep<Tensor<1>>) -> Result<Params, Error> {
    let specs = step.parameters().to_vec();
    let params = specs.iter().map(|spec| {
        let path = spec.path.to_string();
        let value = bits(&step.parameter(&path)?);
        Ok((path, value))
    });
    params.collect()
}

/// Resumes from the newest step of a folder with one of the engines, trains up to `until` steps and saves.
fn leg<O: Optimizer>(
    optimizer: &O,
    format: StateFormat,
    (ranks, engine): (usize, Engine),
    until: u64,
    folder: &Path,
) -> Option<Params> {
    let (optimizer, folder) = (optimizer.clone(), folder.to_owned());
    let done = on_ranks(ranks, move |world| {
        let checkpoints = Checkpoints::new(&folder);
        let saved = checkpoints.newest().ok();
        let from = saved.as_ref().map(|saved| saved.index().training.step);
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let (mut taken, params) = if engine == Engine::Eager {
            let device = Device::flex().autodiff().gradient_checkpointing();
            let policy = ShardPolicy::new().cut(Cut::Multiples(StateFormat::BLOCK));
            let net = fully_shard(Net::new(&device), &mesh, policy)?;
            let optimizer = LowBitOptimizer::new(optimizer.clone(), format);
            let mut state = (net, ModuleOptimizer::from(optimizer));
            if let Some(saved) = &saved {
                state = restore(state.0, state.1, saved)?;
            }
            let (mut net, mut optimizer) = state;
            for step in from.unwrap_or(0)..until {
                let gradients = backward(net.loss(gradients(step, &device)), &net)?;
                net = optimizer.step(RATE, net, gradients);
            }
            (snapshot(&net, &optimizer, mesh.mesh(), "shard")?, None)
        } else {
            let mut step = step_of(&optimizer, format, mode(engine, &world)?)?;
            if let Some(saved) = &saved {
                restore_compiled(&mut step, saved)?;
            }
            for number in from.unwrap_or(0)..until {
                step.step(RATE, &gradients(number, &Device::flex()))?;
            }
            let params = whole(&mut step)?;
            let taken = snapshot_compiled(&mut step, mesh.mesh(), "shard")?;
            (taken, Some(params))
        };
        let training = TrainingState {
            step: until,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        let request = SaveRequest::new(taken.plan, training);
        let mut meet = GroupRendezvous::new(world);
        save_step(&checkpoints, &request, &mut taken.snapshot, &mut meet)?;
        Ok(params)
    });
    done.into_iter().next().flatten()
}

fn assert_bits(got: &Params, want: &Params, what: &str) {
    assert_eq!(got.len(), 5, "{what}");
    for (path, got) in got {
        let different = got.iter().zip(&want[path]).filter(|(a, b)| a != b).count();
        assert_eq!(
            (got.len(), different),
            (want[path].len(), 0),
            "{what}: {path}"
        );
    }
}

fn adamw() -> AdamW {
    AdamWConfig::new().with_amsgrad(true).build()
}

fn momentum() -> Sgd {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .build()
}

/// An optimizer whose state is large where the parameter is zero, as in the padding of a shard.
#[derive(Debug, Clone)]
struct Near;

#[derive(Debug, Clone)]
struct NearState<const D: usize>(Tensor<D>);

impl<const D: usize> RecordState for NearState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "near", self.0.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let near = source.take_tensor(prefix, "near")?;
        Some(Self(Tensor::from_data(near, device)))
    }
}

impl Optimizer for Near {
    type State<const D: usize> = NearState<D>;

    fn step<const D: usize>(
        &self,
        rate: f64,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<NearState<D>>,
    ) -> (Tensor<D>, Option<NearState<D>>) {
        let near = tensor.clone().abs().mul_scalar(-3.0).add_scalar(1.0);
        let near = match state {
            Some(NearState(old)) => old.mul_scalar(0.5) + near.mul_scalar(0.5),
            None => near,
        };
        let next = tensor - gradient.mul_scalar(rate) - near.clone().mul_scalar(1e-3);
        (next, Some(NearState(near)))
    }

    fn to_device<const D: usize>(state: NearState<D>, device: &Device) -> NearState<D> {
        NearState(state.0.to_device(device))
    }
}

fn assert_matches_plain_burn<O: Optimizer>(optimizer: &O, steps: u64) {
    for format in FORMATS {
        let want = plain(optimizer, format, steps);
        for ranks in 1..=4 {
            let strategies = [
                Strategy::FullShard,
                Strategy::ShardGradOp,
                Strategy::NoShard,
            ];
            let engines = strategies.map(Engine::Compiled).into_iter();
            let hybrid = (ranks == 4).then_some(Engine::Hybrid);
            for engine in engines.chain([Engine::Owners]).chain(hybrid) {
                let optimizer = optimizer.clone();
                let got = on_ranks(ranks, move |world| {
                    let mut step = step_of(&optimizer, format, mode(engine, &world)?)?;
                    for number in 0..steps {
                        step.step(RATE, &gradients(number, &Device::flex()))?;
                    }
                    whole(&mut step)
                });
                for got in got {
                    assert_bits(
                        &got,
                        &want,
                        &format!("{format:?}, {ranks} ranks, {engine:?}"),
                    );
                }
            }
        }
    }
}

#[test]
fn results_match_plain_burn_bit_for_bit() {
    assert_matches_plain_burn(&adamw(), 5);
    assert_matches_plain_burn(&momentum(), 4);
    assert_matches_plain_burn(&Near, 4);
}

/// The optimizer runs in backward by default.
#[test]
fn rounding_does_not_depend_on_the_schedule() {
    for format in FORMATS {
        let want = plain(&adamw(), format, 4);
        for place in [OptimizerPlace::AtEnd, OptimizerPlace::InNextForward] {
            let got = on_ranks(3, move |world| {
                let mode = mode(FULL, &world)?.options(Options::default().optimizer(place));
                let mut step = step_of(&adamw(), format, mode)?;
                for number in 0..4 {
                    step.step(RATE, &gradients(number, &Device::flex()))?;
                }
                whole(&mut step)
            });
            assert_bits(&got[0], &want, &format!("{format:?}, {place:?}"));
        }
        let got = on_ranks(2, move |world| {
            let mut step = step_of(&adamw(), format, mode(FULL, &world)?)?;
            for number in 0..4 {
                let batch = gradients(number, &Device::flex());
                step.step_accumulated(RATE, &[batch.clone(), batch])?;
            }
            whole(&mut step)
        });
        assert_bits(&got[0], &want, &format!("{format:?}, micro-batches"));
    }
}

#[test]
fn steps_resume_in_either_engine_on_other_ranks() {
    for format in FORMATS {
        let folder = tempfile::tempdir().expect("a folder");
        let legs = [
            (2, FULL),
            (3, Engine::Eager),
            (3, FULL),
            (1, Engine::Compiled(Strategy::NoShard)),
            (4, Engine::Owners),
            (2, Engine::Eager),
            (4, FULL),
        ];
        let mut until = 0;
        for (ranks, engine) in legs {
            until += 1 + until % 2;
            let got = leg(&adamw(), format, (ranks, engine), until, folder.path());
            if let Some(got) = got {
                let want = plain(&adamw(), format, until);
                assert_bits(
                    &got,
                    &want,
                    &format!("{format:?}, step {until}, {engine:?}"),
                );
            }
        }
    }
}

/// A shard of 8-bit states begins between blocks, before and after the first step.
#[test]
fn parameters_are_cut_between_blocks() {
    let got = on_ranks(4, |world| {
        let mut cuts = Vec::new();
        for format in FORMATS {
            let mut step = step_of(&adamw(), format, mode(FULL, &world)?)?;
            let mut sum = Evaluation::new(Net::drawn, |net: &Net, x: Tensor<1>| net.loss(x));
            let batch = gradients(0, &Device::flex());
            let before = step.layout("first.weight")?.cut;
            step.evaluate(&mut sum, &batch)?;
            step.step(RATE, &batch)?;
            step.evaluate(&mut sum, &batch)?;
            let states = step.state_shards("first.weight")?;
            let lens = states.iter().map(|(_, state)| state.num_elements());
            cuts.push((before, step.layout("first.weight")?.cut, lens.collect()));
        }
        Ok::<Vec<(Cut, Cut, Vec<usize>)>, Error>(cuts)
    });
    let blocks = Cut::Multiples(StateFormat::BLOCK);
    for (rank, [elements, lens]) in [[84, 256], [84, 77], [84, 0], [81, 0]]
        .into_iter()
        .enumerate()
    {
        let flat = (Cut::Elements, Cut::Elements, vec![elements; 3]);
        assert_eq!(
            got[rank],
            [flat, (blocks, blocks, vec![lens; 3])],
            "rank {rank}"
        );
    }
}

/// Half and a quarter of AdamW's states in 32 bits, in memory and in the plan.
#[test]
fn states_shrink_to_a_half_and_a_quarter() {
    const SIDE: usize = 256;
    #[derive(Module, Debug)]
    struct Square {
        layers: Vec<Linear>,
    }
    for (format, of_state) in [
        (None, 4 * SIDE * SIDE),
        (Some(StateFormat::Bf16), 2 * SIDE * SIDE),
        (Some(StateFormat::Block8), SIDE * SIDE + 4 * SIDE),
    ] {
        let got = on_ranks(2, move |world| {
            let init = |device: &Device| {
                let layer = LinearConfig::new(SIDE, SIDE).with_bias(false);
                let layers = (0..4).map(|_| layer.init(device)).collect();
                Square { layers }
            };
            let loss = |net: &Square, x: Tensor<2>| {
                let layers = net.layers.iter();
                layers.fold(x, |x, layer| layer.forward(x)).square().mean()
            };
            let mode = Mode::data_parallel(world.clone(), Strategy::FullShard).verified();
            let adamw = AdamWConfig::new().build();
            let mut step = match format {
                None => compile(init, loss, adamw, mode)?,
                Some(format) => compile(init, loss, LowBitOptimizer::new(adamw, format), mode)?,
            };
            let x = Tensor::<2>::ones([2, SIDE], &Device::flex());
            for _ in 0..3 {
                step.step(RATE, &x)?;
            }
            let graph = step.compile_for(RATE, &x)?;
            let plan = MemoryPlan::new(&graph, world.rank())?;
            step.reset_peak();
            step.step(RATE, &x)?;
            let memory = step.memory();
            Ok((
                memory.live_bytes(),
                memory.peak_bytes() as u64,
                plan.peak_bytes(),
            ))
        });
        for (live, peak, planned) in got {
            let expected = (4 * 4 * SIDE * SIDE + 4 * 2 * of_state) / 2;
            assert_eq!((live, peak), (expected, planned), "{format:?}");
        }
    }
}

/// Certificates cover the rounding of each shard.
#[test]
fn plans_are_certified() {
    for format in FORMATS {
        for engine in [FULL, Engine::Owners, Engine::Compiled(Strategy::NoShard)] {
            let got = on_ranks(3, move |world| {
                let mut step = step_of(&adamw(), format, mode(engine, &world)?.certified())?;
                for number in 0..3 {
                    let batch = gradients(number, &Device::flex());
                    step.step(RATE, &batch)?;
                    step.step_accumulated(RATE, &[batch.clone(), batch])?;
                }
                Ok(step.certificate().is_some())
            });
            assert_eq!(got, [true; 3], "{format:?}, {engine:?}");
        }
    }
}

/// States that were not rounded before are rounded where they are set, with the same bits on any ranks.
#[test]
fn states_are_rounded_where_they_are_set() {
    let values: Vec<f32> = (0..333).map(|i| 1.0 + i as f32 / 7.0).collect();
    let slot = "moment_1";
    let mut all = Vec::new();
    for ranks in [1, 3] {
        let values = TensorData::new(values.clone(), [9, 37]);
        let got = on_ranks(ranks, move |world| {
            let mut step = step_of(
                &AdamWConfig::new().build(),
                StateFormat::Bf16,
                mode(FULL, &world)?,
            )?;
            step.step(RATE, &gradients(0, &Device::flex()))?;
            let states = step.states("first.weight")?;
            let name = states.iter().map(|(name, _)| name.clone());
            let name = name
                .into_iter()
                .find(|name| name.ends_with(slot))
                .expect("kept");
            step.set_state("first.weight", &name, values.clone())?;
            step.compile_for(RATE, &gradients(1, &Device::flex()))?;
            let states = step.states("first.weight")?;
            let set = states.into_iter().find(|(other, _)| *other == name);
            Ok(set.expect("kept").1)
        });
        assert!(got.iter().all(|state| *state == got[0]));
        all.push(got[0].clone());
    }
    let rounded: Vec<f32> = all[0].iter::<f32>().collect();
    assert_eq!(all[0], all[1]);
    assert!(rounded.iter().all(|value| value.to_bits() & 0xffff == 0));
    let off = rounded
        .iter()
        .zip(&values)
        .map(|(got, set)| (got - set).abs() / set);
    assert!(off.fold(0.0, f32::max) < 1.0 / 127.0);
}

#[test]
fn placements_and_parameters_in_16_bits_are_refused() {
    let refused =
        on_ranks(1, |world| {
            let mesh = ProcessMesh::new(&world, Mesh::line("model", 1)?)?;
            let mode = Mode::expand(mesh, Expand::new());
            let mut step = step_of(&adamw(), StateFormat::Block8, mode)?;
            let placed = step.step(RATE, &gradients(0, &Device::flex()));
            let half = |device: &Device| {
                let weight = Tensor::<2>::ones([9, 37], (device, DType::BF16));
                Linear {
                    weight: Param::from_tensor(weight),
                    bias: None,
                }
            };
            let step = compile(
                half,
                |net: &Linear, x: Tensor<2>| net.forward(x).sum(),
                LowBitOptimizer::new(adamw(), StateFormat::Bf16),
                Mode::data_parallel(world, Strategy::FullShard),
            );
            Ok([placed.map(|_| ()), step.map(|_| ())]
                .map(|result| result.err().map(|e| e.to_string())))
        });
    let [Some(placed), Some(half)] = &refused[0] else {
        panic!("{refused:?}");
    };
    assert!(
        placed.contains("first.weight") && placed.contains("LowBitOptimizer"),
        "{placed}"
    );
    assert!(
        half.contains("BF16") && half.contains("LowBitOptimizer"),
        "{half}"
    );
}
