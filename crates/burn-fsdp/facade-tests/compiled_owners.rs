//! Parameters with one owner in compiled steps, compared with plain Burn and the eager engine.

use std::path::Path;
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{
    AdafactorConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, MuonConfig,
    SgdConfig,
};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fsdp::checkpoint::{Checkpoints, restore, snapshot};
use burn_fsdp::compile::{
    CompiledStep, Evaluation, Expand, Mode, OptimizerGroups, Options, compile, load_compiled,
    restore_compiled, snapshot_compiled,
};
use burn_fsdp::internals::checkpoint::{GroupRendezvous, SaveRequest, TrainingState, save_step};
use burn_fsdp::internals::compile::DataParallel;
use burn_fsdp::internals::compile::graph::{Collective, CollectiveKind, Graph};
use burn_fsdp::internals::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::internals::compile::passes::{GraphTransform, PassId};
use burn_fsdp::internals::mesh::Partition;
use burn_fsdp::internals::state::{full_state, local_state};
use burn_fsdp::plan::MemoryPlan;
use burn_fsdp::{
    Clip, Error, LaunchConfig, Mesh, Precision, ProcessGroup, ProcessMesh, ShardPolicy, Strategy,
    backward, clip_grad_norm, fully_shard, launch,
};

/// Sizes that no number of ranks divides, in layers of different sizes.
const WIDTHS: [usize; 4] = [9, 7, 11, 5];
const RATE: f64 = 1e-2;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layers = WIDTHS.windows(2).take(2);
        let layers = layers.map(|ends| LinearConfig::new(ends[0], ends[1]).init(device));
        let net = Self {
            layers: layers.collect(),
            head: LinearConfig::new(WIDTHS[2], WIDTHS[3])
                .with_bias(false)
                .init(device),
        };
        net.map(&mut Fixed(0))
    }

    fn frozen(device: &Device) -> Self {
        let mut net = Self::new(device);
        net.layers[1].weight = net.layers[1].weight.clone().set_require_grad(false);
        net
    }

    fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for layer in &self.layers {
            x = layer.forward(x).tanh();
        }
        self.head.forward(x)
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.forward(x).square().mean()
    }
}

/// Gives parameters fixed values that are not drawn, on demand.
struct Fixed(usize);

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        let first = self.0;
        self.0 += shape.num_elements();
        let (id, device) = (param.id, param.lazy_device());
        let values = (first..self.0).map(|at| ((at * 7919) % 1009) as f32 / 1009.0 * 0.6 - 0.3);
        let data = TensorData::new(values.collect::<Vec<f32>>(), shape);
        let value = Tensor::from_data(data, &device);
        let value = if device.is_autodiff() {
            value.require_grad()
        } else {
            value
        };
        Param::initialized(id, value)
    }
}

/// The batch of a rank in a step, or of all ranks.
fn batch(step: u64, rank: Option<usize>, device: &Device) -> Tensor<2> {
    let rank = rank.map_or(0, |rank| rank as u64 + 1);
    let value = |i: u64| ((i * 7 + step * 5 + rank * 3) % 13) as f32 / 13.0 - 0.4;
    let values: Vec<f32> = (0..4 * 9).map(value).collect();
    Tensor::from_data(TensorData::new(values, [4, 9]), device)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Optimizer {
    /// Muon for matrices, AdamW for the rest.
    Muon,
    Adafactor,
    Lamb,
    Sgd,
}

const ALL: [Optimizer; 4] = [
    Optimizer::Muon,
    Optimizer::Adafactor,
    Optimizer::Lamb,
    Optimizer::Sgd,
];

impl Optimizer {
    fn groups(self) -> OptimizerGroups {
        match self {
            Self::Muon => {
                let matrices = ParamGroup::from_any_predicates(vec!["weight"]);
                let rest = OptimizerGroups::from(AdamWConfig::new().build());
                rest.with_group(matrices, MuonConfig::new().build())
            }
            Self::Adafactor => AdafactorConfig::new().build().into(),
            Self::Lamb => LambConfig::new().build().into(),
            Self::Sgd => SgdConfig::new().build().into(),
        }
    }

    fn plain(self) -> ModuleOptimizer {
        self.groups().into()
    }

    /// Returns the patterns of parameters with one owner.
    fn owned(self) -> [&'static str; 1] {
        match self {
            Self::Muon => ["**.weight"],
            _ => ["**"],
        }
    }
}

/// The settings of a run.
#[derive(Debug, Clone)]
struct Run {
    optimizer: Optimizer,
    ranks: usize,
    /// Ranks that hold copies of other ranks' values.
    copies: usize,
    strategy: Strategy,
    is_frozen: bool,
    /// True if each rank has a different batch.
    differs: bool,
    micro: u64,
    clip: Option<f64>,
    options: fn(Options) -> Options,
    precision: Option<FloatDType>,
}

impl Run {
    fn new(optimizer: Optimizer, ranks: usize) -> Self {
        Self {
            optimizer,
            ranks,
            copies: 1,
            strategy: Strategy::FullShard,
            is_frozen: false,
            differs: false,
            micro: 1,
            clip: None,
            options: |options| options,
            precision: None,
        }
    }

    fn init(&self) -> impl Fn(&Device) -> Net + Send + Copy + use<> {
        let is_frozen = self.is_frozen;
        move |device: &Device| {
            if is_frozen {
                Net::frozen(device)
            } else {
                Net::new(device)
            }
        }
    }

    fn mesh(&self, world: &ProcessGroup) -> Result<ProcessMesh, Error> {
        let mesh = match self.copies {
            1 => Mesh::line("shard", self.ranks)?,
            copies => Mesh::new([("replicate", copies), ("shard", self.ranks / copies)])?,
        };
        Ok(ProcessMesh::new(world, mesh)?)
    }

    fn mode(&self, world: &ProcessGroup) -> Result<Mode, Error> {
        let mode = match self.copies {
            1 => Mode::data_parallel(world.clone(), self.strategy),
            _ => Mode::hybrid(self.mesh(world)?, "replicate", self.strategy)?,
        };
        let options = (self.options)(Options::default().kernels(false));
        let options = options.clip_grad_norm(self.clip.map(Clip::to));
        let options = match self.precision {
            Some(compute) => options.precision(Precision::new(compute)),
            None => options,
        };
        let mode = mode.options(options).verified().certified();
        Ok(mode.one_owner(self.optimizer.owned()))
    }

    fn step(&self, world: &ProcessGroup) -> Result<CompiledStep<Tensor<2>>, Error> {
        let compute = self.precision;
        let loss = move |net: &Net, x: Tensor<2>| match compute {
            Some(dtype) => net.loss(x.cast(dtype)),
            None => net.loss(x),
        };
        let mode = self.mode(world)?;
        Ok(compile(self.init(), loss, self.optimizer.groups(), mode)?)
    }

    fn batches(&self, step: u64, rank: usize, device: &Device) -> Vec<Tensor<2>> {
        let micro = step * self.micro..(step + 1) * self.micro;
        let rank = self.differs.then_some(rank);
        micro.map(|step| batch(step, rank, device)).collect()
    }

    fn train(&self, step: &mut CompiledStep<Tensor<2>>, steps: [u64; 2]) -> Result<(), Error> {
        let rank = step.rank();
        for number in steps[0]..steps[1] {
            let batches = self.batches(number, rank, &Device::flex());
            match batches.as_slice() {
                [one] => step.step(RATE, one)?,
                several => step.step_accumulated(RATE, several)?,
            };
        }
        Ok(())
    }

    /// Trains compiled: returns the whole parameters after some steps, on every rank.
    fn compiled(&self, steps: u64) -> Vec<Params> {
        let run = self.clone();
        let got = launch(config(self.ranks), move |world| {
            let mut step = run.step(&world)?;
            run.train(&mut step, [0, steps])?;
            whole(&mut step)
        });
        got.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Trains with the eager engine: returns rank 0's whole parameters.
    fn eager(&self, steps: u64) -> Params {
        let run = self.clone();
        let got = launch(config(self.ranks), move |world| {
            let (mut net, mut optimizer) = run.sharded(&world)?;
            for step in 0..steps {
                net = run.eager_step(net, &mut optimizer, (step, world.rank()))?;
            }
            params(&net)
        });
        got.unwrap_or_else(|error| panic!("{self:?}: {error}"))
            .swap_remove(0)
    }

    fn sharded(&self, world: &ProcessGroup) -> Result<(Net, ModuleOptimizer), Error> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let policy = ShardPolicy::new().units(["layers.*"]);
        let policy = policy.strategy(self.strategy).shard_vectors(true);
        let policy = policy.one_owner(self.optimizer.owned());
        let policy = match self.precision {
            Some(compute) => policy.precision(Precision::new(compute)),
            None => policy,
        };
        let policy = match self.copies {
            1 => policy,
            _ => policy.replicate_axis("replicate"),
        };
        let net = fully_shard(self.init()(&device), &self.mesh(world)?, policy)?;
        Ok((net, self.optimizer.plain()))
    }

    fn eager_step(
        &self,
        net: Net,
        optimizer: &mut ModuleOptimizer,
        (step, rank): (u64, usize),
    ) -> Result<Net, Error> {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let [x] = self.batches(step, rank, &device).try_into().expect("one");
        let x = match self.precision {
            Some(dtype) => x.cast(dtype),
            None => x,
        };
        let mut gradients = backward(net.loss(x), &net)?;
        if let Some(clip) = self.clip {
            gradients = clip_grad_norm(&net, gradients, Clip::to(clip))?.gradients;
        }
        Ok(optimizer.step(RATE, net, gradients))
    }

    /// Trains with plain Burn, on one rank.
    fn plain(&self, steps: u64) -> Params {
        let device = Device::flex().autodiff();
        let (mut net, mut optimizer) = (self.init()(&device), self.optimizer.plain());
        for step in 0..steps {
            let mut losses = self.batches(step, 0, &device).into_iter();
            let first = net.loss(losses.next().expect("a batch"));
            let loss = losses.fold(first, |sum, x| sum + net.loss(x));
            let loss = loss.mul_scalar(1.0 / self.micro as f64);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(RATE, net, gradients);
        }
        let layers = net.layers.iter().zip(["layers.0", "layers.1"]);
        let mut named = Vec::new();
        for (layer, path) in layers.chain([(&net.head, "head")]) {
            let floats = |data: TensorData| data.try_to_vec::<f32>().expect("floats");
            named.push((
                format!("{path}.weight"),
                floats(layer.weight.val().into_data()),
            ));
            if let Some(bias) = &layer.bias {
                named.push((format!("{path}.bias"), floats(bias.val().into_data())));
            }
        }
        named
    }
}

/// Whole parameters, by path.
type Params = Vec<(String, Vec<f32>)>;

fn config(ranks: usize) -> LaunchConfig {
    LaunchConfig::new(ranks).deadline(Duration::from_secs(60))
}

/// The whole parameters of a sharded model, on rank 0. Collective.
fn params(net: &Net) -> Result<Params, Error> {
    let mut named = Vec::new();
    full_state(net, |tensor| {
        let floats = tensor.bytes.chunks_exact(4);
        let floats =
            floats.map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        named.push((tensor.path.to_owned(), floats.collect()));
    })?;
    Ok(named)
}

/// Collective.
fn whole(step: &mut CompiledStep<Tensor<2>>) -> Result<Params, Error> {
    let paths: Vec<String> = step
        .parameters()
        .iter()
        .map(|p| p.path.to_string())
        .collect();
    let named = paths.into_iter().map(|path| {
        let values = step.parameter(&path)?.try_to_vec::<f32>().expect("floats");
        Ok((path, values))
    });
    named.collect()
}

/// Returns the distance between two sets of parameters, relative to the largest value of each.
fn distance(got: &Params, want: &Params) -> f32 {
    let pairs = got.iter().zip(want).map(|((path, got), (of, want))| {
        assert_eq!((path, got.len()), (of, want.len()));
        let most = want
            .iter()
            .fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let pairs = got.iter().zip(want).map(|(a, b)| (a - b).abs() / most);
        // A value that is not a number is infinitely far.
        pairs.fold(0f32, |far, own| if own <= far { far } else { own })
    });
    pairs.fold(0f32, |far, own| if own <= far { far } else { own })
}

/// Every rank has the same batch: a mean of two or four equal gradients has the same bits.
#[test]
fn optimizers_of_whole_tensors_match_burn_bit_for_bit() {
    for optimizer in ALL {
        let want = Run::new(optimizer, 1).plain(4);
        for ranks in 1..=4 {
            for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
                let run = Run {
                    strategy,
                    ..Run::new(optimizer, ranks)
                };
                check(&run, &want);
            }
        }
        let hybrid = Run {
            copies: 2,
            ..Run::new(optimizer, 4)
        };
        check(&hybrid, &want);
    }
}

fn check(run: &Run, want: &Params) {
    for got in run.compiled(4) {
        match run.ranks {
            3 => assert!(distance(&got, want) < 1e-5, "{run:?}"),
            _ => assert_eq!(&got, want, "{run:?}"),
        }
    }
}

/// Tests orders of the step, frozen parameters, and steps of several micro-batches.
#[test]
fn owners_match_burn_bit_for_bit_in_every_order() {
    let orders: [fn(Options) -> Options; 5] = [
        |options| options.prefetch(true),
        |options| options.bucket(None).fuse(false),
        |options| options.optimizer(OptimizerPlace::AtEnd),
        |options| options.optimizer(OptimizerPlace::InNextForward),
        |options| {
            options
                .optimizer(OptimizerPlace::InNextForward)
                .prefetch(true)
        },
    ];
    for optimizer in [Optimizer::Muon, Optimizer::Adafactor] {
        for is_frozen in [false, true] {
            let plain = Run {
                is_frozen,
                ..Run::new(optimizer, 1)
            };
            let want = plain.plain(4);
            for options in orders {
                let run = Run {
                    options,
                    is_frozen,
                    ..Run::new(optimizer, 2)
                };
                check(&run, &want);
            }
        }
        let micro = Run {
            micro: 2,
            ..Run::new(optimizer, 2)
        };
        let want = micro.plain(4);
        for got in micro.compiled(4) {
            assert!(distance(&got, &want) < 1e-5, "{optimizer:?}");
        }
    }
}

/// Ranks have different batches; the bits are the eager engine's.
#[test]
fn owners_match_the_eager_engine_bit_for_bit() {
    for optimizer in ALL {
        for ranks in 1..=4 {
            let run = Run {
                differs: true,
                ..Run::new(optimizer, ranks)
            };
            assert_eq!(run.compiled(4)[0], run.eager(4), "{run:?}");
        }
        let hybrid = Run {
            differs: true,
            copies: 2,
            ..Run::new(optimizer, 4)
        };
        assert_eq!(hybrid.compiled(4)[0], hybrid.eager(4), "{hybrid:?}");
        let halves = Run {
            differs: true,
            precision: Some(FloatDType::BF16),
            ..Run::new(optimizer, 3)
        };
        assert_eq!(halves.compiled(4)[0], halves.eager(4), "{halves:?}");
    }
}

/// Parameters that a rank does not hold add nothing to the norm, even if it owns no gradient at all.
#[test]
fn gradients_of_owners_are_clipped_as_one_vector() {
    for optimizer in [Optimizer::Lamb, Optimizer::Muon] {
        for (ranks, copies) in [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)] {
            let run = Run {
                differs: true,
                clip: Some(1e-3),
                copies,
                ..Run::new(optimizer, ranks)
            };
            let free = Run {
                clip: None,
                ..run.clone()
            };
            let (got, want) = (run.compiled(3), run.eager(3));
            assert!(distance(&got[0], &want) < 1e-5, "{run:?}");
            assert!(distance(&got[0], &free.compiled(3)[0]) > 1e-5, "{run:?}");
            let norms = Run {
                micro: 2,
                ..run.clone()
            };
            let norms = launch(config(ranks), move |world| {
                let mut step = norms.step(&world)?;
                norms.train(&mut step, [0, 1])?;
                Ok::<_, Error>(step.grad_norm())
            });
            let norms = norms.unwrap_or_else(|error| panic!("{run:?}: {error}"));
            assert!(norms[0].is_some_and(|norm| norm > 1e-3), "{norms:?}");
            assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:?}");
        }
    }
}

/// Runs one of the engines, from the newest step of a folder.
fn leg(folder: &Path, run: &Run, is_compiled: bool, until: u64) -> Vec<Params> {
    let (run, folder) = (run.clone(), folder.to_owned());
    let ranks = run.ranks;
    let got = launch(config(ranks), move |world| {
        let saved = Checkpoints::new(&folder).newest().ok();
        let from = saved
            .as_ref()
            .map_or(0, |saved| saved.index().training.step);
        let (mesh, axis) = (run.mesh(&world)?, "shard");
        let (taken, whole) = if is_compiled {
            let mut step = run.step(&world)?;
            if let Some(saved) = &saved {
                restore_compiled(&mut step, saved)?;
            }
            run.train(&mut step, [from, until])?;
            let taken = snapshot_compiled(&mut step, mesh.mesh(), axis)?;
            (taken, whole(&mut step)?)
        } else {
            let (mut net, mut optimizer) = run.sharded(&world)?;
            if let Some(saved) = &saved {
                (net, optimizer) = restore(net, optimizer, saved)?;
            }
            for step in from..until {
                net = run.eager_step(net, &mut optimizer, (step, world.rank()))?;
            }
            let taken = snapshot(&net, &optimizer, mesh.mesh(), axis)?;
            (taken, params(&net)?)
        };
        let mut taken = taken;
        let training = TrainingState {
            step: until,
            optimizer: taken.optimizer,
            ..TrainingState::default()
        };
        let request = SaveRequest::new(taken.plan, training);
        let mut meet = GroupRendezvous::new(world);
        save_step(
            &Checkpoints::new(&folder),
            &request,
            &mut taken.snapshot,
            &mut meet,
        )?;
        Ok::<_, Error>(whole)
    });
    got.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn training_resumes_in_either_engine_with_any_owners() {
    for optimizer in [Optimizer::Muon, Optimizer::Adafactor, Optimizer::Lamb] {
        let want = Run::new(optimizer, 1).plain(6);
        let run = |ranks, copies| Run {
            copies,
            ..Run::new(optimizer, ranks)
        };
        let legs = [
            (run(2, 1), true),
            (run(4, 1), true),
            (run(2, 1), false),
            (run(4, 2), true),
            (run(1, 1), true),
            (run(4, 1), false),
        ];
        for (index, first) in legs.iter().enumerate() {
            let second = &legs[(index + 1) % legs.len()];
            let folder = tempfile::tempdir().expect("a folder");
            leg(folder.path(), &first.0, first.1, 3);
            let got = leg(folder.path(), &second.0, second.1, 6);
            assert_eq!(got[0], want, "{first:?}, then {second:?}");
        }
    }
}

/// Four matrices of one size are on as many ranks. Each rank has one matrix with its states, and nothing of the
/// others. A step with all states, or all parameters, on every rank would need half as much again.
#[test]
fn a_rank_holds_what_it_owns() {
    const DIM: usize = 64;
    #[derive(Module, Debug)]
    struct Square {
        layers: Vec<Linear>,
    }
    let got = launch(config(4), |world| {
        let init = |device: &Device| {
            let layer = LinearConfig::new(DIM, DIM).with_bias(false);
            let layers = (0..4).map(|_| layer.init(device));
            Square {
                layers: layers.collect(),
            }
        };
        let loss = |net: &Square, x: Tensor<2>| {
            let layers = net.layers.iter();
            layers.fold(x, |x, layer| layer.forward(x)).square().mean()
        };
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mode = mode.one_owner(["**"]).verified();
        let mut step = compile(init, loss, MuonConfig::new().build(), mode)?;
        let x = Tensor::<2>::ones([2, DIM], &Device::flex());
        for _ in 0..4 {
            step.step(RATE, &x)?;
        }
        let graph = step.compile_for(RATE, &x)?;
        let plan = MemoryPlan::new(&graph, world.rank())?;
        step.reset_peak();
        step.step(RATE, &x)?;
        let held = (0..4).map(|layer| {
            let path = format!("layers.{layer}.weight");
            let states = step.state_shards(&path)?;
            let states = states.iter().map(|(_, data)| data.num_elements());
            Ok((step.shard(&path)?.num_elements(), states.sum::<usize>()))
        });
        let held = held.collect::<Result<Vec<_>, Error>>()?;
        let memory = step.memory();
        let peaks = (memory.peak_bytes() as u64, plan.peak_bytes());
        Ok::<_, Error>((held, memory.live_bytes(), peaks))
    });
    let matrix = DIM * DIM;
    for (rank, (held, live, peaks)) in got.expect("no rank failed").into_iter().enumerate() {
        let (elements, states): (Vec<usize>, Vec<usize>) = held.into_iter().unzip();
        let (mut own, mut none) = (vec![0; 4], vec![0; 4]);
        own[rank] = matrix;
        none[rank] = matrix;
        assert_eq!((elements, states), (own, none), "rank {rank}");
        assert!(
            live >= 2 * 4 * matrix && live < 3 * 4 * matrix,
            "rank {rank}: {live}"
        );
        assert_eq!(peaks.0, peaks.1, "rank {rank}");
    }
}

/// Tests the work between steps: evaluations, values set whole and in parts, and conversions to the eager
/// engine.
#[test]
fn owned_values_are_read_set_and_evaluated() {
    let run = Run::new(Optimizer::Muon, 3);
    let got = launch(config(3), move |world| {
        let mut step = run.step(&world)?;
        let x = batch(7, None, &Device::flex());
        let mut evaluation = Evaluation::new(Net::new, |net: &Net, x: Tensor<2>| net.forward(x));
        let before = step.evaluate(&mut evaluation, &x)?.into_data();
        run.train(&mut step, [0, 2])?;
        let after = step.evaluate(&mut evaluation, &x)?.into_data();
        assert_ne!(before, after);
        // Values that were set whole, or by each rank's part, are read back unchanged.
        for path in ["head.weight", "layers.0.bias"] {
            let old = step.parameter(path)?;
            let doubled = old.iter::<f32>().map(|x| 2.0 * x).collect::<Vec<_>>();
            let doubled = TensorData::new(doubled, old.shape().clone());
            step.set_parameter(path, doubled.clone())?;
            assert_eq!(step.parameter(path)?, doubled);
            let shard = step.shard(path)?;
            step.set_parameter(path, old.clone())?;
            step.set_shard(path, shard)?;
            assert_eq!(step.parameter(path)?, doubled);
            step.set_parameter(path, old)?;
        }
        let states = step.states("head.weight")?;
        assert_eq!(states[0].1.shape().to_vec(), [11, 5]);
        for (slot, data) in states {
            step.set_state("head.weight", &slot, data)?;
        }
        run.train(&mut step, [2, 4])?;
        let (net, _) = run.sharded(&world)?;
        let net = load_compiled(net, &mut step)?;
        // Ranks that had loaded it in other portions would have values of other numbers, and refuse to gather them.
        let here = step.evaluate(&mut evaluation, &x)?.into_data();
        let there = net.valid().forward(x).into_data();
        assert_eq!(here, there);
        let owned = local_state(&net)?;
        assert!(owned.iter().any(|tensor| tensor.elements.is_empty()));
        Ok::<_, Error>((whole(&mut step)?, params(&net)?))
    });
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let want = Run::new(Optimizer::Muon, 3).compiled(4);
    assert_eq!((&got[0].0, &got[0].1), (&want[0], &want[0]));
}

#[test]
fn impossible_owners_are_named_in_the_error() {
    let loss = |net: &Net, x: Tensor<2>| net.loss(x);
    let error = |mode: Mode| {
        let step = compile(Net::new, loss, Optimizer::Muon.groups(), mode);
        let step = step.and_then(|mut step| step.step(RATE, &batch(0, None, &Device::flex())));
        step.expect_err("it cannot run").to_string()
    };
    let solo = || Mode::data_parallel(ProcessGroup::solo(), Strategy::FullShard);
    // Muon on flat shards: the error names the remedy.
    let flat = error(solo());
    assert!(
        flat.contains("layers.0.weight") && flat.contains("Mode::one_owner"),
        "{flat}"
    );
    let unknown = error(solo().one_owner(["tail.*"]));
    assert!(
        unknown.contains("tail.*") && unknown.contains("head.weight"),
        "{unknown}"
    );
    let automatic = Mode::data_parallel(ProcessGroup::solo(), DataParallel::Automatic);
    let mesh = Mesh::line("model", 1).expect("an axis");
    let mesh = ProcessMesh::new(&ProcessGroup::solo(), mesh).expect("one rank");
    for placed in [automatic, Mode::expand(mesh, Expand::new())] {
        let placed = error(placed.one_owner(["head"]));
        assert!(
            placed.contains("head.weight") && placed.contains("Mode::hybrid"),
            "{placed}"
        );
    }
}

/// A pass that sends data to the wrong rank.
#[derive(Debug)]
struct Misdirected(CollectiveKind);

impl GraphTransform for Misdirected {
    fn id(&self) -> PassId {
        PassId::User("misdirected")
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, burn_fsdp::internals::compile::Error> {
        let mut nodes = graph.take_nodes();
        let collectives = nodes.iter_mut().filter_map(|node| node.collective.as_mut());
        let of_kind = |collective: &&mut Collective| collective.kind == self.0;
        for collective in collectives.filter(of_kind) {
            for part in &mut collective.parts {
                let own = part.partition;
                let owner = 1 - own.sole_owner().expect("an owner");
                part.partition = Partition::one_owner(own.num_elements(), 2, owner)?;
            }
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

/// Types detect the error, in every plan, before anything runs.
#[test]
fn plans_with_misdirected_owners_are_rejected() {
    for kind in [CollectiveKind::AllGather, CollectiveKind::ReduceScatter] {
        let refused = launch(config(2), move |world| {
            let mode = Mode::data_parallel(world, Strategy::FullShard);
            let mode = mode.one_owner(["**"]).transform(Misdirected(kind));
            let loss = |net: &Net, x: Tensor<2>| net.loss(x);
            let mut step = compile(Net::new, loss, LambConfig::new().build(), mode)?;
            let error = step.step(RATE, &batch(0, None, &Device::flex()));
            Ok::<_, Error>(error.expect_err("another rank's").to_string())
        });
        for message in refused.unwrap_or_else(|error| panic!("{error}")) {
            assert!(message.contains("owned("), "{message}");
        }
    }
}
