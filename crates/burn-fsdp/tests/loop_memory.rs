//! Burn's own training loop, sharded: bounds on bytes that fail if a whole model, or its optimizer's state, is held
//! anywhere.
#![cfg(feature = "train")]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn::train::metric::LossMetric;
use burn::train::metric::store::EventStoreClient;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    EarlyStoppingStrategy, InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_fsdp::checkpoint::snapshot;

use burn_fsdp::compile::Options;
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{LaunchConfig, Mesh, ShardPolicy, Strategy, backward, fully_shard, launch};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const RANKS: usize = 2;
const LAYERS: usize = 32;
const DIM: usize = 512;
/// Bytes of a layer.
const UNIT: usize = 4 * DIM * DIM;
/// Bytes of the model, which is also the total over all ranks.
const MODEL: usize = LAYERS * UNIT;
/// Bytes for a whole parameter or its states on their way, a few times, for the transport's buffers of units, and for
/// bookkeeping. The bookkeeping does not grow with the layers: each rank's data for the trial of the optimizer at each
/// parameter already takes some MiB.
const IN_FLIGHT: usize = RANKS * 6 * UNIT + (10 << 20);
/// The same for compiled steps, which gather the next unit during a unit's forward.
const IN_FLIGHT_COMPILED: usize = RANKS * 8 * UNIT + (10 << 20);

/// The bytes before the training, and the maximum while ..
static BEFORE: AtomicUsize = AtomicUsize::new(0);
/// .. parameters and states were divided,
static AT_START: AtomicUsize = AtomicUsize::new(0);
/// .. an epoch was saved.
static IN_SAVE: AtomicUsize = AtomicUsize::new(0);
/// The number of training batches that have been read.
static READ: AtomicUsize = AtomicUsize::new(0);

/// Returns the peak memory of the training since the last call.
fn taken() -> usize {
    let peak = HEAP.peak_usage();
    HEAP.reset_peak_usage();
    peak.saturating_sub(BEFORE.load(Ordering::SeqCst))
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    /// Layers that Burn initializes on demand.
    fn new(device: &Device) -> Self {
        let layer = |_| LinearConfig::new(DIM, DIM).with_bias(false).init(device);
        Self {
            layers: (0..LAYERS).map(layer).collect(),
        }
    }

    fn forward(&self, batch: Tensor<2>) -> RegressionOutput {
        let each = |x: Tensor<2>, layer: &Linear| layer.forward(x.clone()).tanh() + x;
        let output = self.layers.iter().fold(batch.clone(), each);
        let loss = MseLoss::new().forward(output.clone(), batch.clone(), Reduction::Mean);
        RegressionOutput {
            loss,
            output,
            targets: batch,
        }
    }
}

impl TrainStep for Stack {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Stack {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, batch: Tensor<2>) -> RegressionOutput {
        self.forward(batch)
    }
}

/// Both engines read a batch before they compute with it.
#[derive(Debug, Clone, Copy)]
enum Rows {
    Trained,
    Validated,
}

impl Batcher<f32, Tensor<2>> for Rows {
    fn batch(&self, rows: Vec<f32>, device: &Device) -> Tensor<2> {
        match self {
            // No rank reads its second batch before all have their first.
            Self::Trained if READ.fetch_add(1, Ordering::SeqCst) + 1 == RANKS => {
                AT_START.store(taken(), Ordering::SeqCst);
            }
            Self::Trained => {}
            // The save follows the last validation.
            Self::Validated => drop(taken()),
        }
        let rows = rows
            .into_iter()
            .map(|x| Tensor::<1>::full([DIM], x, device));
        Tensor::stack(rows.collect(), 0)
    }
}

struct Numbers(usize);

impl Dataset<f32> for Numbers {
    fn get(&self, index: usize) -> Result<f32, DatasetError> {
        Ok((index % 7) as f32 / 7.0)
    }

    fn len(&self) -> usize {
        self.0
    }
}

/// Burn asks after it has saved the epoch.
#[derive(Clone)]
struct Measured;

impl EarlyStoppingStrategy for Measured {
    fn should_stop(&mut self, _epoch: usize, _store: &EventStoreClient) -> bool {
        IN_SAVE.fetch_max(taken(), Ordering::SeqCst);
        false
    }
}

#[derive(Debug, Clone, Copy)]
enum Engine {
    Eager,
    Compiled,
}

fn train(engine: Engine, folder: &Path, epochs: usize, from: Option<usize>) {
    let loader = |rows, items| {
        let builder = DataLoaderBuilder::new(rows).batch_size(2);
        builder.build(Numbers(items))
    };
    let loaders = (
        loader(Rows::Trained, 4 * RANKS),
        loader(Rows::Validated, RANKS),
    );
    let training: SupervisedTraining<Lent<Stack>> =
        SupervisedTraining::new(folder, loaders.0, loaders.1);
    let training = training
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .early_stopping(Measured)
        .with_default_checkpointers()
        .num_epochs(epochs);
    let training = match from {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };
    for measured in [&AT_START, &IN_SAVE, &READ] {
        measured.store(0, Ordering::SeqCst);
    }
    BEFORE.store(HEAP.current_usage(), Ordering::SeqCst);
    HEAP.reset_peak_usage();
    let sharded = FullySharded::new(LaunchConfig::new(RANKS)).scratch(folder.join("scratch"));
    match engine {
        Engine::Eager => eagerly(sharded, training),
        Engine::Compiled => compiled(&sharded, training),
    }
}

fn eagerly(sharded: FullySharded, training: SupervisedTraining<Lent<Stack>>) {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let sharded = sharded.policy(ShardPolicy::new().units(["layers.*"]).prefetch(0));
    let optimizer = AdamWConfig::new().init();
    let end = |_: &_, _: Stack, _| Ok(());
    let result = sharded.launch_sharded(training, Stack::new(&device), optimizer, 1e-3, end);
    let result = result.unwrap_or_else(|error| panic!("{error}"));
    assert!(result.error.is_none());
    assert_eq!(result.model.len(), RANKS);
}

fn compiled(sharded: &FullySharded, training: SupervisedTraining<Lent<Stack>>) {
    let result = sharded.launch_compiled(
        training,
        (Stack::new, Stack::forward),
        (AdamWConfig::new().build(), 1e-3),
        (Strategy::FullShard, Options::default()),
    );
    let result = result.unwrap_or_else(|error| panic!("{error}"));
    assert!(result.error.is_none());
}

/// One test at a time has the heap.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn no_process_holds_the_whole_model_or_the_whole_state() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    bounded(Engine::Eager);
}

#[test]
fn compiled_steps_hold_neither_the_whole_model_nor_the_whole_state() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    bounded(Engine::Compiled);
}

fn bounded(engine: Engine) {
    // Each bound fails if there is one more copy of the model somewhere.
    const { assert!(IN_FLIGHT < MODEL && IN_FLIGHT_COMPILED < MODEL) };
    let in_flight = match engine {
        Engine::Eager => IN_FLIGHT,
        Engine::Compiled => IN_FLIGHT_COMPILED,
    };
    let within = |what: &str, got: &AtomicUsize, models: usize| {
        let (got, most) = (got.load(Ordering::SeqCst), models * MODEL + in_flight);
        println!("{what}: {got} bytes of {most}");
        assert!(got >= models * MODEL, "{what} is measured: {got}");
        assert!(got <= most, "{what}: {got} bytes, {most} at most");
    };
    let folder = tempfile::tempdir().expect("a folder");
    train(engine, folder.path(), 2, None);
    within("parameters at the start", &AT_START, 1);
    within("parameters and states in a save", &IN_SAVE, 3);
    train(engine, folder.path(), 3, Some(2));
    within("parameters and states of a checkpoint", &AT_START, 3);
    within("parameters and states in a save", &IN_SAVE, 3);
    let scratch = std::fs::read_dir(folder.path().join("scratch")).expect("it was made");
    assert_eq!(scratch.count(), 0, "nothing is left");
}

/// The parameters are shared with the training, and Burn's record of the optimizer exists in pieces.
#[test]
fn a_snapshot_copies_the_state_of_the_optimizer_once() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let ranks = LaunchConfig::new(RANKS);
    let taken = launch(ranks, |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let policy = ShardPolicy::new().units(["layers.*"]).prefetch(0);
        let model = fully_shard(Stack::new(&device), &world, policy)?;
        let mut optimizer = AdamWConfig::new().init();
        let batch = Tensor::<2>::ones([2, DIM], &device);
        let gradients = backward(model.forward(batch).loss, &model)?;
        let model = optimizer.step(1e-3, model, gradients);
        let mesh = Mesh::line("shard", RANKS).expect("a mesh");
        // The memory left by the trial of the optimizer.
        drop(snapshot(&model, &optimizer, &mesh, "shard").expect("a snapshot"));
        world.barrier("the heap")?;
        if world.rank() == 0 {
            BEFORE.store(HEAP.current_usage(), Ordering::SeqCst);
            HEAP.reset_peak_usage();
        }
        world.barrier("the heap")?;
        let held = snapshot(&model, &optimizer, &mesh, "shard").expect("a snapshot");
        world.barrier("the heap")?;
        let most = taken();
        world.barrier("the heap")?;
        drop(held);
        Ok::<_, burn_fsdp::Error>(most)
    });
    let most = taken.expect("a training").into_iter().max();
    let most = most.expect("ranks");
    println!("a snapshot: {most} bytes");
    assert!(most >= 2 * MODEL, "both moments are copied: {most}");
    assert!(
        most <= 2 * MODEL + IN_FLIGHT,
        "{most} bytes, {} at most",
        2 * MODEL + IN_FLIGHT
    );
}
