//! Recomputed regions, with dropout and BatchNorm in them, in both engines, compared with plain Burn.
//!
//! Burn has one generator for all threads of a process, so these tests run one after the other.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fsdp::compile::{Mode, Options, compile};
use burn_fsdp::internals::compile::graph::Phase;
use burn_fsdp::internals::sharding::offload_activations;
use burn_fsdp::state::into_record;
use burn_fsdp::{
    Error, LaunchConfig, ProcessGroup, ShardPolicy, Strategy, backward, catch, fully_shard, launch,
    recompute,
};

const DIM: usize = 7;
const ROWS: usize = 5;
const STEPS: usize = 4;
const RATE: f64 = 0.2;

/// Returns the device of a number of ranks: for an even one, the inputs of regions move.
fn device_of(ranks: usize) -> Device {
    [elsewhere(), Device::flex()][ranks % 2].clone()
}

/// A backend that is not the host's.
#[allow(deprecated, reason = "there is no other second backend on the CPU")]
fn elsewhere() -> Device {
    Device::ndarray()
}

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
    dropout: Dropout,
}

impl Block {
    /// Returns the tensor that dropout is applied to.
    fn kept(&self, x: Tensor<2>) -> Tensor<2> {
        gelu(self.norm.forward(self.linear.forward(x)))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout.forward(self.kept(x))
    }
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

/// The way in which a block runs.
#[derive(Debug, Clone)]
enum How {
    Region,
    Kept,
    /// The region of a step, with given dropout masks by block.
    Dropped(Vec<TensorData>),
}

impl Net {
    fn new(probability: f64, device: &Device) -> Self {
        let block = |_| Block {
            linear: LinearConfig::new(DIM, DIM).init(device),
            norm: BatchNormConfig::new(DIM).init(device),
            dropout: DropoutConfig::new(probability).init(),
        };
        let net = Self {
            blocks: (0..2).map(block).collect(),
            head: LinearConfig::new(DIM, 3).init(device),
        };
        net.map(&mut Values::default())
    }

    /// Returns the loss, and the output of each block.
    fn loss(&self, x: Tensor<2>, how: &How) -> (Tensor<1>, Vec<Tensor<2>>) {
        let mut x = x;
        let mut outputs = Vec::new();
        for (index, block) in self.blocks.iter().enumerate() {
            let y = match how {
                How::Region => recompute(block, x.clone(), |block: &Block, x| block.forward(x)),
                How::Kept => block.forward(x.clone()),
                How::Dropped(masks) => {
                    let mask = Tensor::<2>::from_data(masks[index].clone(), &x.device());
                    block.kept(x.clone()) * mask
                }
            };
            outputs.push(y.clone());
            x = x + y;
        }
        (self.head.forward(x).square().mean(), outputs)
    }
}

/// The dropout mask of a block: zeros, and elsewhere the factor of the remaining elements.
fn mask(output: &Tensor<2>, probability: f64) -> TensorData {
    let factor = 1.0 / (1.0 - probability) as f32;
    let values = output.to_data().convert::<f32>();
    let values = values.try_to_vec::<f32>().expect("floats");
    let mask = values
        .iter()
        .map(|value| if *value == 0.0 { 0.0 } else { factor });
    TensorData::new(mask.collect::<Vec<f32>>(), output.dims())
}

fn batch(step: usize, rank: usize, device: &Device) -> Tensor<2> {
    let value = |i: usize| ((i * 37 + step * 11 + rank * 29) % 19) as f32 / 9.5 - 1.0;
    let values: Vec<_> = (0..ROWS * DIM).map(value).collect();
    Tensor::from_data(TensorData::new(values, [ROWS, DIM]), device)
}

/// Values by the number of the parameter; running states keep their usual initial values.
#[derive(Default)]
struct Values {
    number: usize,
    field: String,
}

impl ModuleMapper for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        name.clone_into(&mut self.field);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.field.starts_with("running_") {
            return param;
        }
        self.number += 1;
        let (number, base) = (self.number, f32::from(u8::from(self.field == "gamma")));
        param.init_mapper(move |old| {
            let value = |i: usize| ((i * 53 + number * 31) % 101) as f32 / 101.0 - 0.5 + base;
            let values: Vec<_> = (0..old.shape().num_elements()).map(value).collect();
            Tensor::from_data(TensorData::new(values, old.shape()), &old.device())
        })
    }
}

type Tensors = BTreeMap<String, Vec<f32>>;

/// All float tensors of a module, running states up to date.
fn tensors(module: &Net) -> Tensors {
    #[derive(Default)]
    struct Reader(Vec<String>, Tensors);
    impl ModuleVisitor for Reader {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().try_to_vec();
            self.1.insert(self.0.join("."), values.expect("floats"));
        }
    }
    let mut reader = Reader::default();
    module.valid().visit(&mut reader);
    reader.1
}

/// A rank's record of a training run: by step the loss, the dropout mask of each block, and the tensors after it.
struct Seen {
    losses: Vec<f32>,
    masks: Vec<Vec<TensorData>>,
    tensors: Vec<Tensors>,
}

/// Plain Burn with given dropout masks, on a model for each rank. Gradients are averaged, and each rank has its own
/// running states.
fn plainly(masks: &[Vec<Vec<TensorData>>]) -> Vec<Seen> {
    plainly_on(&Device::flex(), masks)
}

/// Trains without shards on a device. Another backend rounds in another way.
fn plainly_on(device: &Device, masks: &[Vec<Vec<TensorData>>]) -> Vec<Seen> {
    let device = device.clone().autodiff();
    let init = |_: &Vec<Vec<TensorData>>| Net::new(0.0, &device);
    let mut models: Vec<Net> = masks.iter().map(init).collect();
    let seen = |_: &Net| Seen {
        losses: Vec::new(),
        masks: Vec::new(),
        tensors: Vec::new(),
    };
    let mut all: Vec<Seen> = models.iter().map(seen).collect();
    for step in 0..STEPS {
        let mut gradients: Vec<BTreeMap<String, Vec<f32>>> = Vec::new();
        for (rank, model) in models.iter().enumerate() {
            let how = How::Dropped(masks[rank].get(step).expect("a step").clone());
            let (loss, _) = model.loss(batch(step, rank, &device), &how);
            all[rank].losses.push(loss.clone().into_scalar::<f32>());
            let found = GradientsParams::from_grads(loss.backward(), model);
            gradients.push(by_path(model, &found));
        }
        let moved = models.into_iter().map(|model| {
            let mut mean = Averaged {
                path: Vec::new(),
                of_ranks: &gradients,
                mean: GradientsParams::new(),
            };
            model.visit(&mut mean);
            let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
            optimizer.step(RATE, model, mean.mean)
        });
        models = moved.collect();
        for (seen, model) in all.iter_mut().zip(&models) {
            seen.tensors.push(tensors(model));
        }
    }
    all
}

fn by_path(model: &Net, gradients: &GradientsParams) -> Tensors {
    struct Reader<'a>(Vec<String>, Tensors, &'a GradientsParams);
    impl ModuleVisitor for Reader<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.2.get::<D>(param.id) {
                let values = gradient.into_data().try_to_vec().expect("floats");
                self.1.insert(self.0.join("."), values);
            }
        }
    }
    let mut reader = Reader(Vec::new(), Tensors::new(), gradients);
    model.visit(&mut reader);
    reader.1
}

struct Averaged<'a> {
    path: Vec<String>,
    of_ranks: &'a [Tensors],
    mean: GradientsParams,
}

impl ModuleVisitor for Averaged<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let of_ranks = self.of_ranks.iter().filter_map(|of| of.get(&path));
        let value = param.val();
        let parts = of_ranks.map(|values| {
            let data = TensorData::new(values.clone(), value.shape());
            Tensor::<D>::from_data(data, &value.device().inner())
        });
        if let Some(sum) = parts.reduce(|sum, part| sum + part) {
            let mean = sum.div_scalar(self.of_ranks.len() as f32);
            self.mean.register(param.id, mean);
        }
    }
}

fn assert_close(what: &str, got: &Seen, want: &Seen) {
    for (step, (got, want)) in got.losses.iter().zip(&want.losses).enumerate() {
        assert!(
            (got - want).abs() <= 1e-5 * want.abs(),
            "{what}, step {step}: {got} is not {want}"
        );
    }
    for (step, (got, want)) in got.tensors.iter().zip(&want.tensors).enumerate() {
        for (path, want) in want {
            let scale = want
                .iter()
                .fold(1e-2_f32, |max, value| max.max(value.abs()));
            let values = got.get(path).unwrap_or_else(|| panic!("{what}: no {path}"));
            for (got, want) in values.iter().zip(want) {
                let far = (got - want).abs() / scale;
                assert!(
                    far <= 2e-5,
                    "{what}, step {step}, {path}: {got} is not {want}"
                );
            }
        }
    }
    assert_eq!(got.tensors.len(), want.tensors.len(), "{what}");
}

/// Something was dropped, and never the same.
fn assert_drawn(masks: &[Vec<TensorData>]) {
    let all: Vec<Vec<f32>> = masks
        .iter()
        .flatten()
        .map(|mask| mask.try_to_vec().expect("floats"))
        .collect();
    for (index, mask) in all.iter().enumerate() {
        let zeros = mask.iter().filter(|value| **value == 0.0).count();
        assert!(zeros > 0 && zeros < mask.len());
        assert!(!all[..index].contains(mask), "a mask was drawn twice");
    }
}

fn trained(world: &ProcessGroup, probability: f64, policy: &ShardPolicy) -> Result<Seen, Error> {
    trained_on(&Device::flex(), world, probability, policy)
}

/// Trains on a device, with the inputs of regions on the host until backward.
fn trained_on(
    device: &Device,
    world: &ProcessGroup,
    probability: f64,
    policy: &ShardPolicy,
) -> Result<Seen, Error> {
    let device = device.clone().autodiff().gradient_checkpointing();
    let mut model = fully_shard(Net::new(probability, &device), world, policy.clone())?;
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut seen = Seen {
        losses: Vec::new(),
        masks: Vec::new(),
        tensors: Vec::new(),
    };
    for step in 0..STEPS {
        let x = batch(step, world.rank(), &device);
        let forward = || catch(|| model.loss(x, &How::Region));
        let (loss, outputs) = offload_activations(Device::flex(), forward)??;
        let masks = outputs.iter().map(|output| mask(output, probability));
        seen.masks.push(masks.collect());
        drop(outputs);
        seen.losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = catch(|| optimizer.step(RATE, model, gradients))?;
        let whole = Net::new(probability, &device).load_record(into_record(model.clone())?);
        seen.tensors.push(tensors(&whole));
    }
    Ok(seen)
}

fn policies() -> [ShardPolicy; 3] {
    let blocks = ShardPolicy::new().units(["blocks.*"]);
    [
        blocks.clone(),
        blocks.strategy(Strategy::NoShard),
        ShardPolicy::new(),
    ]
}

/// A compiled step plans its memory without the host.
#[test]
fn compiled_steps_refuse_to_offload_regions() {
    let _alone = alone();
    let world = ProcessGroup::solo();
    let refused = offload_activations(Device::flex(), || {
        compiled(&world, &How::Region, Options::default()).map(drop)
    });
    let refused = refused.expect("the CPU backend");
    let message = refused.expect_err("it has a region").to_string();
    assert!(message.contains("a region of a compiled step"), "{message}");
    assert!(message.contains("`Options::recompute_units`"), "{message}");
    let kept = offload_activations(Device::flex(), || {
        compiled(&world, &How::Kept, Options::default()).map(drop)
    });
    kept.expect("the CPU backend").expect("no region");
}

/// The mask of a region is the same in backward, and its BatchNorm counts a batch once.
#[test]
fn dropout_repeats_its_mask_if_each_rank_is_a_process() {
    let _alone = alone();
    for policy in policies() {
        for device in [Device::flex(), elsewhere()] {
            let seen = trained_on(&device, &ProcessGroup::solo(), 0.4, &policy).expect("trains");
            assert_drawn(&seen.masks);
            let want = plainly_on(&device, std::slice::from_ref(&seen.masks));
            assert_close("one rank", &seen, &want[0]);
        }
        let launched = launch(LaunchConfig::new(1), move |world| {
            trained(&world, 0.4, &policy)
        });
        let seen = launched.expect("trains").remove(0);
        let want = plainly(std::slice::from_ref(&seen.masks));
        assert_close("one rank that was launched", &seen, &want[0]);
    }
}

/// The numbers drawn from a seed are the same in every run.
#[test]
fn a_seed_repeats_a_run_with_regions() {
    let _alone = alone();
    let run = |seed| {
        Device::flex().seed(seed);
        let seen = trained(&ProcessGroup::solo(), 0.4, &policies()[0]).expect("trains");
        (seen.losses, seen.tensors)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).0, run(4).0);
}

#[test]
fn dropout_is_refused_where_ranks_are_threads() {
    let _alone = alone();
    let said = launch(LaunchConfig::new(2), |world| {
        trained(&world, 0.4, &policies()[0]).map(drop)
    });
    let said = said
        .expect_err("two ranks draw from one generator")
        .to_string();
    assert!(said.contains("make regions deterministic"), "{said}");
}

/// Running states are updated once, on every rank by its own batches.
#[test]
fn running_states_are_updated_once() {
    let _alone = alone();
    for policy in policies() {
        for ranks in 1..=4 {
            let own = policy.clone();
            let seen = launch(LaunchConfig::new(ranks), move |world| {
                trained_on(&device_of(ranks), &world, 0.0, &own)
            });
            let seen = seen.unwrap_or_else(|error| panic!("{error}"));
            let masks: Vec<_> = seen.iter().map(|seen| seen.masks.clone()).collect();
            for (rank, (got, want)) in seen
                .iter()
                .zip(plainly_on(&device_of(ranks), &masks))
                .enumerate()
            {
                assert_close(&format!("rank {rank} of {ranks}"), got, &want);
            }
        }
    }
}

/// Trains by compiled steps; returns the record of the training, and the products of backward.
fn compiled(world: &ProcessGroup, how: &How, options: Options) -> Result<(Seen, usize), Error> {
    let how = how.clone();
    let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
    let mode = mode.options(options).seeded(5).verified();
    let init = |device: &Device| Net::new(0.4, device);
    let loss = move |model: &Net, x: Tensor<2>| model.loss(x, &how);
    let mut step = compile(init, loss, SgdConfig::new().build(), mode)?;
    let mut seen = Seen {
        losses: Vec::new(),
        masks: Vec::new(),
        tensors: Vec::new(),
    };
    for number in 0..STEPS {
        let x = batch(number, world.rank(), &Device::flex());
        seen.losses.push(step.step(RATE, &x)? as f32);
        let outputs: Vec<Tensor<2>> = step.outputs()?.remove(0);
        let masks = outputs.iter().map(|output| mask(output, 0.4));
        seen.masks.push(masks.collect());
        let paths: Vec<_> = step.parameters().iter().map(|s| s.path.clone()).collect();
        let mut tensors = Tensors::new();
        for path in paths {
            if let Ok(values) = step.parameter(&path)?.try_to_vec() {
                tensors.insert(path.to_string(), values);
            }
        }
        seen.tensors.push(tensors);
    }
    let graph = step.graph().expect("it has run");
    let backward = graph.nodes().iter().filter(|n| n.phase == Phase::Backward);
    let is_product = |name: String| {
        name.contains("matmul") || name.contains("Matmul") || name.contains("Linear")
    };
    Ok((
        seen,
        backward.filter(|node| is_product(node.name())).count(),
    ))
}

#[test]
fn regions_of_compiled_steps_are_computed_again() {
    let _alone = alone();
    for kernels in [false, true] {
        let options = Options::default().kernels(kernels).recompute(None);
        for ranks in 1..=4 {
            let run = |how: How| {
                let options = options.clone();
                let seen = launch(LaunchConfig::new(ranks), move |world| {
                    compiled(&world, &how, options.clone())
                });
                seen.unwrap_or_else(|error| panic!("{error}"))
            };
            let again = run(How::Region);
            assert_drawn(&again[0].0.masks);
            let kept = run(How::Kept);
            assert!(
                again[0].1 > kept[0].1,
                "{} products, and {} without",
                again[0].1,
                kept[0].1
            );
            let masks: Vec<_> = again.iter().map(|(seen, _)| seen.masks.clone()).collect();
            let mut want = plainly(&masks);
            // The loss is the mean over the ranks, and running states are rank 0's, which shows only its own.
            let mean = |step: usize| {
                let losses = want.iter().map(|want| want.losses[step]);
                losses.sum::<f32>() / ranks as f32
            };
            let losses: Vec<f32> = (0..STEPS).map(mean).collect();
            for (rank, ((got, _), want)) in again.iter().zip(&mut want).enumerate() {
                want.losses = losses.clone();
                for tensors in &mut want.tensors {
                    tensors.retain(|path, _| rank == 0 || !path.contains("running_"));
                }
                assert_close(&format!("rank {rank} of {ranks}"), got, want);
            }
        }
    }
}

/// The result of a block in a nest: its output, outputs so far, and the places of a selection.
type Nest = (Tensor<2>, Vec<Tensor<2>>, Option<Tensor<1, Int>>);

/// A loss whose blocks pass nests on, in regions or not.
fn loss_of_nests(
    net: &Net,
    (x, places): (Tensor<2>, Tensor<1, Int>),
    is_region: bool,
) -> Tensor<1> {
    fn run(block: &Block, (x, mut outputs, places): Nest) -> Nest {
        let y = block.kept(x.clone());
        let y = match &places {
            Some(places) => y.clone() + y.mean_dim(0) * places.clone().float().mean().unsqueeze(),
            None => y,
        };
        outputs.push(y.clone());
        (x + y, outputs, places)
    }
    let mut nest = (x, Vec::new(), Some(places.clone()));
    for block in &net.blocks {
        nest = if is_region {
            recompute(block, nest, run)
        } else {
            run(block, nest)
        };
    }
    let (x, outputs, _) = nest;
    let x = outputs.into_iter().fold(x, |x, output| x + output * 0.3);
    net.head.forward(x.select(0, places)).square().mean()
}

/// Regions of compiled steps and of eager ones take the same nests.
#[test]
fn regions_take_nests_in_both_engines() {
    let _alone = alone();
    let given = |step: usize, device: &Device| {
        let places = Tensor::<1, Int>::from_data([0, 3, 1 + step as i64 % 2, 3], device);
        (batch(step, 0, device), places)
    };
    let eager = |is_region: bool| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let model = Net::new(0.0, &device);
        let mut model = fully_shard(model, &ProcessGroup::solo(), policy).expect("is new");
        let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = loss_of_nests(&model, given(step, &device), is_region);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model).expect("runs");
            model = optimizer.step(RATE, model, gradients);
        }
        losses
    };
    let compiled = |is_region: bool| {
        let mode = Mode::data_parallel(ProcessGroup::solo(), Strategy::FullShard);
        let options = Options::default().kernels(false).recompute(None);
        let mode = mode.options(options).verified();
        let loss = move |model: &Net, given: (Tensor<2>, Tensor<1, Int>)| {
            loss_of_nests(model, given, is_region)
        };
        let init = |device: &Device| Net::new(0.0, device);
        let mut step = compile(init, loss, SgdConfig::new().build(), mode).expect("compiles");
        let losses = (0..STEPS).map(|number| {
            let given = given(number, &Device::flex());
            step.step(RATE, &given).expect("runs") as f32
        });
        let losses: Vec<f32> = losses.collect();
        let graph = step.graph().expect("it has run");
        let backward = graph.nodes().iter().filter(|n| n.phase == Phase::Backward);
        (losses, backward.count())
    };
    let device = Device::flex().autodiff();
    let mut model = Net::new(0.0, &device);
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut want = Vec::new();
    for step in 0..STEPS {
        let loss = loss_of_nests(&model, given(step, &device), false);
        want.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    let (again, kept) = (compiled(true), compiled(false));
    assert!(
        again.1 > kept.1,
        "{} nodes, and {} without",
        again.1,
        kept.1
    );
    for losses in [eager(true), eager(false), again.0, kept.0] {
        for (got, want) in losses.iter().zip(&want) {
            assert!(
                (got - want).abs() <= 1e-5 * want.abs(),
                "{got} is not {want}"
            );
        }
    }
}
